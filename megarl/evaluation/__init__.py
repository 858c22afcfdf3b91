"""Held-out evaluation: pure metrics, and `megarl eval` on a stand-alone engine."""
