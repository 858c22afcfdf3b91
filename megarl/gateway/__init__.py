"""The HTTP gateway to the pool, for harnesses outside megarl."""
