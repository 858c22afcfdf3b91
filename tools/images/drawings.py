"""All drawings of docs/images by their file names."""

from __future__ import annotations

from pathlib import Path

from tools.images.learning import learning_pictures
from tools.images.quickstart_run import QuickstartRun
from tools.images.reward_curve import reward_curve
from tools.images.system import SYSTEM
from tools.images.system_picture import system_picture

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
NUMBERS = "quickstart_run.json"


def drawings() -> dict[str, str]:
    """Return the content of each SVG file, from the committed numbers."""
    run = QuickstartRun.model_validate_json((IMAGES / NUMBERS).read_text())
    made = {"quickstart_reward.svg": reward_curve(run), "system.svg": system_picture(SYSTEM)}
    return made | learning_pictures()
