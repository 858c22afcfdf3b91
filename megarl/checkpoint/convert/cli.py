"""The command line of `megarl convert` and tools/checkpoint/convert.py."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

import torch

from megarl.checkpoint.convert.hf_to_megatron import HFToMegatron
from megarl.checkpoint.convert.job import ByteProgress, Options, convert
from megarl.checkpoint.convert.megatron_to_hf import MegatronToHF
from megarl.checkpoint.convert.ranks import Ranks
from megarl.checkpoint.convert.verify import compare, describe
from megarl.checkpoint.format.manifest import MANIFEST, DamagedCheckpointError, Manifest, check_files
from megarl.checkpoint.format.megatron_files import MegatronDirectory
from megarl.common.errors import ConversionError
from megarl.common.values import GIB
from megarl.models.hf.directory import HFDirectory
from megarl.models.hf.model_files import HF_FILES, HF_SHARD_BYTES, megatron_step


def open_model(path: Path) -> HFDirectory | MegatronDirectory:
    """Open a Hugging Face directory or a Megatron checkpoint.

    Raises ConversionError if `path` is neither, ValueError naming file and tensor if it is damaged.
    """
    if not path.is_dir():
        raise ConversionError(f"{path} is not a directory")
    if step := megatron_step(path):
        return MegatronDirectory(step)
    if not (path / "config.json").is_file():
        raise ConversionError(
            f"{path} is neither a Hugging Face directory (no config.json) nor a Megatron checkpoint (no tracker file)"
        )
    return HFDirectory(path)


def open_hf(path: Path) -> HFDirectory:
    """Open the Hugging Face directory `--hf`. Raises ConversionError for anything else, and ValueError naming file and
    tensor if it is damaged.
    """
    if not path.is_dir():
        raise ConversionError(f"--hf {path} {'is not a directory' if path.exists() else 'does not exist'}")
    if step := megatron_step(path):
        raise ConversionError(
            f"--hf {path} is a Megatron checkpoint already ({step.name}); training can start from it without a "
            "conversion, and export converts it to a Hugging Face directory"
        )
    if not (path / "config.json").is_file():
        raise ConversionError(f"--hf {path} is not a Hugging Face directory: it has no config.json")
    return HFDirectory(path)


def has_manifest(model: MegatronDirectory) -> bool:
    """Return whether the checkpoint has a manifest; Megatron-LM writes none."""
    return (model.step / MANIFEST).is_file()


def check_digests(model: MegatronDirectory, rank: int = 0, ranks: int = 1) -> int:
    """Check a rank's share of the weight files, their index and `hf/` against the manifest; return how many files.

    Reads every byte. Raises DamagedCheckpointError naming each file that differs from its entry or has none.
    """
    manifest = Manifest.read(model.step)
    weights = {str(path.relative_to(model.step)) for path in model.files()}
    unknown = sorted(weights - manifest.files.keys())
    if unknown:
        raise DamagedCheckpointError(f"{model.step / MANIFEST} has no entry for {', '.join(unknown)}")
    wanted = {
        name: entry for name, entry in manifest.files.items() if name in weights or name.startswith(f"{HF_FILES}/")
    }
    names = Manifest(manifest.step, wanted).share(rank, ranks)
    problems = check_files(model.step, wanted, names)
    if problems:
        raise DamagedCheckpointError("the checkpoint is damaged:\n" + "\n".join(problems))
    return len(names)


_EXIT_DELAY_S = 5.0  # torchrun ends all ranks when the first one exits: let rank 0 write its message before
DTYPES = ("bfloat16", "float16", "float32")


def main(
    arguments: Sequence[str] | None = None,
    *,
    program: str = "convert.py",
    of_torchrun: str = "tools/checkpoint/convert.py",
) -> int:
    """Run one command; return 0 for done or equal, 1 for failed or not equal, 130 for interrupted.

    `program`: how it was started, for help and messages; `of_torchrun`: how torchrun starts it. A mistake on the
    command line raises SystemExit(2).
    """
    given = sys.argv[1:] if arguments is None else arguments
    if not given:
        _parser(program, of_torchrun).print_help(sys.stderr)
        return 2
    options = _parser(program, of_torchrun).parse_args(given)
    command: Callable[[argparse.Namespace, TextIO], int] = options.command
    try:
        return command(options, sys.stdout)
    except (ValueError, OSError) as error:
        if int(os.environ.get("RANK", "0")) and "WORLD_SIZE" in os.environ:
            time.sleep(_EXIT_DELAY_S)
            return 1
        sys.stderr.write(f"{program}: {error}\n")
        return 1
    except KeyboardInterrupt:
        remedy = "; continue with --resume" if options.resumable else ""
        sys.stderr.write(f"{program}: interrupted{remedy}\n")
        return 130


def _parser(program: str, of_torchrun: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Hugging Face <-> Megatron-Core checkpoints: exact, streaming, resumable.",
        epilog=f"On several ranks: torchrun --rdzv-backend megarl --nproc-per-node 8 {of_torchrun} import ...",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _import_parser(commands)
    _export_parser(commands)
    _verify_parser(commands)
    _inspect_parser(commands)
    return parser


def _command(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, example: str,
             run: Callable[[argparse.Namespace, TextIO], int]) -> argparse.ArgumentParser:  # fmt: skip
    parser = commands.add_parser(name, help=text, description=text, epilog=f"example: %(prog)s {example}")
    parser.set_defaults(command=run, resumable=False)
    return parser


def _import_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "import",
        "Hugging Face safetensors -> a Megatron-Core torch_dist checkpoint that any TP/PP/VPP/EP layout loads.",
        "--hf Qwen3-8B --out Qwen3-8B-megatron",
        _import,
    )
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="Hugging Face directory")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the checkpoint to write")
    _conversion_arguments(parser)


def _export_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "export",
        "A Megatron checkpoint (its root, or any saved step) -> a Hugging Face directory.",
        "--megatron runs/my/checkpoints/iter_0000100 --hf my-step-100",
        _export,
    )
    parser.add_argument("--megatron", type=Path, required=True, metavar="DIR", help="checkpoint root or step directory")
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="the Hugging Face directory to write")
    parser.add_argument(
        "--shard-gb",
        type=_gigabytes,
        default=HF_SHARD_BYTES,
        metavar="N",
        help=f"largest file in GB (default: {HF_SHARD_BYTES // GIB} GiB)",
    )
    parser.add_argument(
        "--check-digests", action="store_true", help="first check all files against the manifest (reads them twice)"
    )
    _conversion_arguments(parser)


def _verify_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "verify",
        "Compare two models tensor by tensor, each a Hugging Face or a Megatron directory; exit status 0 if equal.",
        "Qwen3-8B Qwen3-8B-megatron --logits --text 'The quick brown fox'",
        _verify,
    )
    parser.add_argument("a", type=Path, metavar="A", help="Hugging Face or Megatron directory")
    parser.add_argument("b", type=Path, metavar="B", help="Hugging Face or Megatron directory")
    parser.add_argument("--logits", action="store_true", help="also run both models in fp32 on a text, with "
                        "transformers or Megatron-Core; fail if log-probs differ by more than --tolerance")  # fmt: skip
    parser.add_argument(
        "--text", action="append", metavar="TEXT", help="a text for --logits; may be given several times"
    )
    parser.add_argument("--text-file", type=Path, metavar="FILE", help="texts for --logits, one per line")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-4,
        metavar="X",
        help="largest accepted |Δ log-prob| (default: %(default)s)",
    )


def _inspect_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "inspect",
        "Show the family, parameters, dtypes, layers, shards and sizes of a Hugging Face or Megatron directory.",
        "Qwen3-8B-megatron",
        _inspect,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="Hugging Face or Megatron directory")


def _conversion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, help="convert to this dtype (default: as stored)")
    parser.add_argument(
        "--workers", type=_positive, metavar="N", help="number of processes (default: 4; 1 under torchrun)"
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, write nothing")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--resume", action="store_true", help="continue a conversion that was interrupted")
    either.add_argument("--force", action="store_true", help="start again, and replace an existing output")
    parser.set_defaults(resumable=True)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _gigabytes(text: str) -> int:
    """Return the bytes of a size given in GB (10**9 bytes)."""
    try:
        count = int(float(text) * 1e9)
    except (ValueError, OverflowError):  # not a number, nan or inf
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in GB above 0")
    return count


def _import(options: argparse.Namespace, stream: TextIO) -> int:
    def job(_: Ranks) -> HFToMegatron:
        return HFToMegatron(open_hf(options.hf), _dtype(options))

    convert(job, options.hf, options.out, _run_options(options), stream)
    return 0


def _export(options: argparse.Namespace, stream: TextIO) -> int:
    def job(ranks: Ranks) -> MegatronToHF:
        source = MegatronDirectory(options.megatron)
        if options.check_digests:
            check_digests(source, ranks.rank, ranks.size)
        return MegatronToHF(source, _dtype(options), options.shard_gb)

    convert(job, options.megatron, options.hf, _run_options(options), stream)
    return 0


def _verify(options: argparse.Namespace, stream: TextIO) -> int:
    texts = _texts(options)
    one, other = (open_model(path) for path in (options.a, options.b))
    for model in (one, other):
        _check_manifest(model, stream)
    total = sum(one.dtype(name).itemsize * torch.Size(one.shape(name)).numel() for name in one.names())
    progress = ByteProgress(stream, "verify", total)
    comparison = compare(one, other, progress.add)
    progress.close()
    stream.write(comparison.render())
    same = comparison.same
    if texts:
        from megarl.checkpoint.convert.logits import agreement

        found = agreement(options.a, options.b, texts)
        stream.write(found.render(options.tolerance))
        same = same and found.max_delta <= options.tolerance
    return 0 if same else 1


def _texts(options: argparse.Namespace) -> list[str]:
    """Return the texts to run both models on; [] without --logits. Raises ConversionError if the options do not fit."""
    texts = [*(options.text or [])]
    if options.text_file is not None:
        texts += [line for line in options.text_file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if options.logits and not texts:
        raise ConversionError("--logits needs a text: add --text TEXT or --text-file FILE")
    if texts and not options.logits:
        raise ConversionError("--text and --text-file have no effect without --logits; add --logits")
    return texts


def _check_manifest(model: HFDirectory | MegatronDirectory, stream: TextIO) -> None:
    """Check a Megatron checkpoint against its manifest, if it has one, so that damage is not taken for a difference."""
    if isinstance(model, MegatronDirectory) and has_manifest(model):
        stream.write(f"{model.step}: {check_digests(model)} files match its manifest\n")


def _inspect(options: argparse.Namespace, stream: TextIO) -> int:
    stream.write(describe(open_model(options.directory)))
    return 0


def _dtype(options: argparse.Namespace) -> torch.dtype | None:
    return getattr(torch, options.dtype) if options.dtype else None


def _run_options(options: argparse.Namespace) -> Options:
    # More workers than cores help, because some wait for the disk while others compute. Each needs memory.
    workers = options.workers or (1 if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 4)
    return Options(workers=workers, force=options.force, resume=options.resume, dry_run=options.dry_run)
