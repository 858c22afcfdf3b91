"""Off-policy corrections: weights and masks of token losses."""
