"""Policy losses, one per file with its options and its paper. Importing this package registers them in `LOSSES`."""

from megarl.algorithms.losses import cispo, dppo, gspo, ppo, sapo
from megarl.algorithms.token_loss import LOSSES

__all__ = ["LOSSES", "cispo", "dppo", "gspo", "ppo", "sapo"]
