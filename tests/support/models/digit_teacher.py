"""A teacher that answers in digits: a random model that plain PyTorch has trained for a few steps."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.models.tiny import make_tiny_model


def make_digit_teacher(directory: Path, steps: int = 40) -> Path:
    """Write the teacher, which is deeper than the student of `tiny_config` and has its vocabulary."""
    make_tiny_model(directory, seed=9, num_hidden_layers=4)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    digits = torch.tensor([tokenizer.convert_tokens_to_ids(str(digit)) for digit in range(10)])
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        prompt = torch.randint(1, len(tokenizer), (16, 10), generator=generator)
        answer = digits[torch.randint(10, (16, 12), generator=generator)]
        logits = model(input_ids=torch.cat([prompt, answer], dim=1)).logits[:, 9:-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answer.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(directory)
    return directory
