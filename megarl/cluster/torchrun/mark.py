"""The name of megarl's rendezvous, and the mark by which ranks know that it has started them."""

NAME = "megarl"
# The pid of the torchrun whose rendezvous this backend serves, set in its environment, which its ranks inherit.
SERVED_BY_VARIABLE = "MEGARL_RENDEZVOUS_AGENT"
