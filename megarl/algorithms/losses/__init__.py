"""Policy losses, one per file with its options and its paper. Importing this package registers them in `LOSSES`."""

from megarl.algorithms.interface.token_loss import LOSSES
from megarl.algorithms.losses import cispo, dppo, gspo, ppo, sapo

__all__ = ["LOSSES", "cispo", "dppo", "gspo", "ppo", "sapo"]
