"""torchrun with megarl's rendezvous."""

NAME = "megarl"
# The pid of the torchrun with this rendezvous, in its environment. Its ranks inherit it and so know that megarl's
# rendezvous started them.
SERVED_BY_VARIABLE = "MEGARL_RENDEZVOUS_AGENT"
