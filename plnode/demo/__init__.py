"""The demo: a whole swarm on this machine, made of the same processes that a swarm on many machines is made of."""
