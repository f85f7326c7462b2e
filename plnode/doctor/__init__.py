"""`plnode doctor`: can this machine take part in a run, and as what?

Whoever joins a run and fails learns it late and from one error at a time: the disk is full after an hour, the port was never open, the
stage that is free needs twice the memory.  Here everything that can be known beforehand is found out in one go.

* `facts`       what there is to know, as plain values; no judgement
* `machine`     finds those of this machine: versions, disk, memory, device
* `surroundings` finds those of the network, with the node's own settings on its own port; or asks the node that runs already
* `checks`      facts → verdicts, each a pure function of its table
* `stages`      the same for the memory of each stage
* `lines`       the same for a line to a member, over one to four lanes
* `report`      verdicts → lines, the last line, JSON and the exit code
* `examination` the order of it all
"""
