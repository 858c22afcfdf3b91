"""One vLLM engine: token ids in; tokens, log-probs and versions out."""
