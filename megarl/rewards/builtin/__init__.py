"""The shipped reward functions: `gsm8k`, `math` and `code`."""
