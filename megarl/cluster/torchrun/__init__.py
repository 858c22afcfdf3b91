"""torchrun with megarl's rendezvous."""
