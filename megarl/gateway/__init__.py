"""HTTP in front of the pool, for harnesses that are not part of megarl."""
