"""Talk to a peer: identity, encryption, streams and tensors over TCP.

Knows bytes, numpy and trio; never imports torch or plnode.
"""
