"""torchrun with megarl's rendezvous."""

NAME = "megarl"
# The pid of the torchrun whose rendezvous this backend serves, set in its environment, which its ranks inherit: by it
# they know that megarl's rendezvous has started them.
SERVED_BY_VARIABLE = "MEGARL_RENDEZVOUS_AGENT"
