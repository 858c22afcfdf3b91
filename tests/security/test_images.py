"""Hostile images and names of images: refused before they are decoded, opened or fetched.

Each is first given to a reader without guards, where it does what it is made for.
"""

from __future__ import annotations

import http.server
import io
import json
import struct
import subprocess
import sys
import threading
import urllib.request
import xml.sax
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from megarl.config.schema.data import DataConfig
from megarl.data.dataset import load_prompts
from megarl.models.hf.image_patches import MOST_PIXELS, ImageError, open_image
from tests.support.checkout import ROOT, environment

SECRET = "the secret"
MEMORY = 2 << 30  # what a process of these tests may have: less than the pixels that the headers claim


def png(width: int, height: int, data: bytes) -> bytes:
    """A gray PNG with these compressed rows."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def bomb() -> bytes:
    """A file of some ten kB with 56 million pixels."""
    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(8_001)) for _ in range(7_000))
    return png(8_000, 7_000, rows + packer.flush())


def test_a_decompression_bomb() -> None:
    content = bomb()
    image = Image.open(io.BytesIO(content))
    image.load()
    assert len(image.tobytes()) > max(500 * len(content), MOST_PIXELS)
    with pytest.raises(ImageError, match=r"8000 x 7000 pixels; at most 50,000,000 are decoded"):
        open_image(content)
    with pytest.raises(ImageError, match="8000 x 7000 pixels"):  # by its header alone: the rest is not looked at
        open_image(content[:100])


LIMITED = f"""
import io, resource, sys
from PIL import Image
from megarl.models.hf.image_patches import ImageError, open_image
content = sys.stdin.buffer.read()
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
Image.MAX_IMAGE_PIXELS = None if sys.argv[1] == "unguarded" else Image.MAX_IMAGE_PIXELS
try:
    (Image.open(io.BytesIO(content)) if sys.argv[1] == "unguarded" else open_image(content)).load()
except (ImageError, MemoryError) as error:
    print(type(error).__name__)
"""


def test_a_header_that_claims_more_pixels_than_there_is_memory() -> None:
    content = png(50_000, 50_000, zlib.compress(bytes(9)))

    def ended(reader: str) -> str:
        command = [sys.executable, "-c", LIMITED, reader]
        return subprocess.run(
            command, input=content, stdout=subprocess.PIPE, cwd=ROOT, env=environment(), timeout=300, check=True
        ).stdout.decode()  # fmt: skip

    assert ended("unguarded") == "MemoryError\n"
    assert ended("guarded") == "ImageError\n"


def test_an_svg_that_reads_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    entity = f'<!DOCTYPE svg [<!ENTITY x SYSTEM "{(tmp_path / "secret").as_uri()}">]>'
    content = f'{entity}<svg xmlns="http://www.w3.org/2000/svg"><text>&x;</text></svg>'.encode()

    class Texts(xml.sax.ContentHandler):
        seen = ""

        def characters(self, content: str) -> None:
            self.seen += content

    reader, texts = xml.sax.make_parser(), Texts()
    reader.setFeature(xml.sax.handler.feature_external_ges, True)
    reader.setContentHandler(texts)
    reader.parse(io.BytesIO(content))
    assert texts.seen == SECRET
    with pytest.raises(ImageError, match="an SVG or XML file") as caught:
        open_image(content)
    assert SECRET not in str(caught.value)


def test_a_program_that_another_program_would_run() -> None:
    """Pillow gives PostScript to Ghostscript."""
    content = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(x) print\n"
    assert Image.open(io.BytesIO(content)).format == "EPS"
    with pytest.raises(ImageError, match="no image file"):
        open_image(content)


@pytest.fixture
def metadata() -> Iterator[str]:
    """The URL of a secret on an address of this machine, as clouds give their machines' credentials."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(SECRET.encode())

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/latest/meta-data"
        server.shutdown()


def jsonl(directory: Path, given: object) -> Path:
    path = directory / "rows.jsonl"
    path.write_text(json.dumps({"images": given, "problem": "x", "answer": "1"}) + "\n")
    return path


def parquet(directory: Path, given: object) -> Path:
    kind = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    row = {"images": [{"bytes": None, "path": given}], "problem": "x", "answer": "1"}
    schema = pa.schema([("images", kind), ("problem", pa.string()), ("answer", pa.string())])
    path = directory / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([row], schema=schema), path)
    return path


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize("attack", ["up", "absolute", "link", "linked directory"])
def test_a_path_of_a_data_file_that_leads_out_of_its_directory(
    attack: str, write: Callable[[Path, object], Path], tmp_path: Path
) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    data.mkdir()
    other.mkdir()
    secret = other / "secret.png"
    Image.new("RGB", (30, 30)).save(secret)
    (data / "link.png").symlink_to(secret)
    (data / "linked").symlink_to(other)
    given = {"up": "../other/secret.png", "absolute": str(secret), "link": "link.png"}.get(attack, "linked/secret.png")
    path = write(data, given)
    assert (path.parent / given).read_bytes() == secret.read_bytes()  # as a reader would that joins paths
    with pytest.raises(ValueError, match=r"rows.*1: field 'images': an image must lie below the directory"):
        load_prompts(path, DataConfig(path=path, images_field="images"))


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_a_url_in_a_data_file(write: Callable[[Path, object], Path], metadata: str, tmp_path: Path) -> None:
    for url in (metadata, Path("/etc/hostname").as_uri()):
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert answer.read()
        path = write(tmp_path, url)
        with pytest.raises(ValueError, match=r"rows.*1: field 'images': no such file"):
            load_prompts(path, DataConfig(path=path, images_field="images"))
