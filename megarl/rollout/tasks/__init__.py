"""The work of a run: prompts, tools, rewards, held-out sets."""
