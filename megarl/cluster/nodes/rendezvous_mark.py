"""The name of megarl's rendezvous, and the mark by which ranks know that it has started them."""

NAME = "megarl"
# The pid of the torchrun whose rendezvous this backend serves, set in its environment, which its ranks inherit.
SERVED_BY_VARIABLE = "MEGARL_RENDEZVOUS_AGENT"
# The seconds that the user has given to that torchrun, after which it kills its ranks when it is stopped.
CHOSEN_VARIABLE = "MEGARL_TORCHRUN_SHUTDOWN_TIMEOUT"
