"""Hostile images and names of images: refused before they are decoded, opened or fetched.

Each is first given to a reader without guards, where it does what it is made for.
"""

import asyncio
import http.server
import io
import json
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
import xml.sax
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from megarl.config.schema.data import DataConfig
from megarl.data.dataset import load_prompts
from megarl.gateway import image_urls
from megarl.gateway.image_urls import ImageUrls
from megarl.models.hf.image_patches import MOST_PIXELS, ImageError, open_image
from tests.support.checkout import ROOT, environment
from tests.support.models.tiny_vision import picture

SECRET = "the secret"
PICTURE = picture(90, 60)
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
from megarl.gateway import image_urls
from megarl.gateway.image_urls import ImageUrls
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


class Site:
    """A server of this process at `address`: `/secret`, an image, and redirects to what follows `/to/`."""

    def __init__(self, address: str, port: int = 0, more: bytes = b"") -> None:
        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                _, _, target = self.path.partition("/to/")
                self.send_response(302 if target else 200)
                if target:
                    self.send_header("Location", target)
                self.end_headers()
                self.wfile.write((PICTURE if self.path.endswith(".png") else SECRET.encode()) + more)

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer((address, port), Answer)
        self.port = self.server.server_port
        self.host = f"{address}:{self.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def metadata() -> Iterator[str]:
    """The URL of a secret on an address of this machine, as clouds give their machines' credentials."""
    site = Site("127.0.0.1")
    yield f"http://{site.host}/latest/meta-data"
    site.close()


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


def unguarded(url: str) -> bytes:
    """What a gateway would read that fetches every URL."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        content: bytes = answer.read()
    return content


def refusal(hosts: Sequence[str], url: str) -> str:
    with pytest.raises(ValueError) as caught:
        asyncio.run(ImageUrls(hosts).read(url))
    assert SECRET not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "127.1", "[::ffff:127.0.0.1]"])
def test_a_url_that_leads_to_an_address_inside(name: str, metadata: str) -> None:
    """By each way to write it; the config allows the name of a host, and cannot know where this leads."""
    url = metadata.replace("127.0.0.1", name)
    assert unguarded(url) == SECRET.encode()
    host = url.split("/")[2].strip("[]").replace("]:", ":")
    assert "not public" in refusal([host, name, host.replace("::ffff:127.0.0.1", "::ffff:7f00:1")], url)
    assert "images are not fetched from" in refusal([], url)
    assert refusal([], "http://169.254.169.254/latest/meta-data").startswith("images are not fetched from")
    assert "not public" in refusal(["169.254.169.254"], "http://169.254.169.254/latest/meta-data")


def test_a_file_by_its_url(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    url = (tmp_path / "secret").as_uri()
    assert unguarded(url) == SECRET.encode()
    assert "only data URLs" in refusal([""], url)


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Site, Site]]:
    """A site whose address, 127.0.0.1, stands for a public one, and one inside at the same port."""
    outside = Site("127.0.0.1")
    inside = Site("127.0.0.2", outside.port)
    monkeypatch.setattr(image_urls, "public", lambda address: address == "127.0.0.1")
    yield outside, inside
    outside.close()
    inside.close()


def test_a_redirect_to_an_address_inside(reached: tuple[Site, Site]) -> None:
    outside, inside = reached
    hosts, secret = [outside.host, inside.host], f"http://{inside.host}/secret"
    assert asyncio.run(ImageUrls(hosts).read(f"http://{outside.host}/to/http://{outside.host}/a.png")) == PICTURE
    url = f"http://{outside.host}/to/{secret}"
    assert unguarded(url) == SECRET.encode()
    assert "images are not fetched from" in refusal([outside.host], url)
    assert "not public" in refusal(hosts, url)
    assert "only data URLs" in refusal(hosts, f"http://{outside.host}/to/file:///etc/passwd")
    around = f"http://{outside.host}/to//to//to//to//to/a.png"
    assert "redirected more than 3 times" in refusal(hosts, around)


def test_a_name_that_leads_inside_when_it_is_looked_up_again(
    reached: tuple[Site, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection goes to the address that was checked."""
    outside, _ = reached
    original, looked = socket.getaddrinfo, [0]

    def rebinding(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host == "rebinds.test":
            looked[0] += 1
            host = "127.0.0.1" if looked[0] == 1 else "127.0.0.2"
        return original(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    name = f"rebinds.test:{outside.port}"
    assert image_urls.public(str(socket.getaddrinfo("rebinds.test", 80)[0][4][0]))
    assert unguarded(f"http://{name}/secret") == SECRET.encode()  # checked, and then looked up again
    looked[0] = 0
    assert asyncio.run(ImageUrls([name]).read(f"http://{name}/a.png")) == PICTURE
    assert looked[0] == 1
    assert "not public" in refusal([name], f"http://{name}/a.png")


def test_a_file_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site("127.0.0.1", more=bytes(1 << 20))
    try:
        monkeypatch.setattr(image_urls, "public", lambda address: True)
        monkeypatch.setattr(image_urls, "MOST_BYTES", 1 << 16)
        url = f"http://{site.host}/a.png"
        assert len(unguarded(url)) > 1 << 20
        assert "more than 65,536 bytes" in refusal([site.host], url)
    finally:
        site.close()


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::1", "2001:0:a9fe:a9fe::1", "::",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not image_urls.public(address)
    assert image_urls.public("1.1.1.1") and image_urls.public("2606:4700:4700::1111")
