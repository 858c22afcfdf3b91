"""Reads images from data URLs in chats, and from URLs of the hosts that the config allows.

No client can make the gateway connect to non-public addresses, such as those inside a cluster or a cloud's metadata:
names are resolved here, every address is checked, and the connection goes to one of these. Redirects are checked like
the client's URLs.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Collection

import httpx

from megarl.common.values import data_url_content
from megarl.models.hf.image_patches import MOST_BYTES
from megarl.rollout.transport.link import own_text

FETCH_S = 20.0  # including redirects
MOST_REDIRECTS = 3
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")  # translated to any IPv4 address


class ImageUrls:
    """Reads images. `hosts`: where they may be fetched, as `name` or `name:port` (`gateway.image_hosts`)."""

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)

    async def read(self, url: str) -> bytes:
        """Return the file of an image. Raises ValueError with the reason if it is not read."""
        try:
            async with asyncio.timeout(FETCH_S):
                if url[:5].lower() == "data:":
                    return await asyncio.to_thread(data_url_content, url, MOST_BYTES)
                return await self._fetch(url)
        except TimeoutError:
            raise ValueError(f"no image has come within {FETCH_S:.0f} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise ValueError(f"it cannot be fetched: {own_text(error) or type(error).__name__}") from error

    async def _fetch(self, url: str) -> bytes:
        where = httpx.URL(url)
        headers = {"Accept-Encoding": "identity"}  # the bound is on the bytes sent
        async with httpx.AsyncClient(headers=headers, trust_env=False, follow_redirects=False) as client:
            for _ in range(MOST_REDIRECTS + 1):
                self._check_host(where)
                host = where.raw_host.decode()
                port = where.port or (443 if where.scheme == "https" else 80)
                pinned = where.copy_with(host=await _public_address(host, port))
                request = client.build_request(
                    "GET", pinned, headers={"Host": where.netloc.decode()}, extensions={"sni_hostname": host}
                )
                answer = await client.send(request, stream=True)
                try:
                    if answer.is_redirect:
                        where = where.join(answer.headers["Location"])
                        continue
                    if answer.status_code != 200:
                        raise ValueError(f"its host answers with status {answer.status_code}")
                    return await _body(answer)
                finally:
                    await answer.aclose()
        raise ValueError(f"its host has redirected more than {MOST_REDIRECTS} times")

    def _check_host(self, url: httpx.URL) -> None:
        if url.scheme not in ("http", "https") or not url.host or url.userinfo:
            raise ValueError("only data URLs in base64 are read, and http or https without a user")
        name = url.raw_host.decode() if url.port is None else f"{url.raw_host.decode()}:{url.port}"
        if name not in self._hosts:
            raise ValueError(
                f"images are not fetched from {name!r}: send the image as a data URL, or allow its host "
                "(gateway.image_hosts)"
            )


async def _public_address(host: str, port: int) -> str:
    """Return an address of a host. Raises ValueError if one of them is not public, and OSError if there is none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(each[4][0]).partition("%")[0] for each in found]
    if not all(map(public, addresses)):
        raise ValueError(f"images are not fetched from {host!r}: one of its addresses is not public")
    return addresses[0]


def public(address: str) -> bool:
    """Return whether an IP address is public; IPv6 addresses that map to IPv4 ones are not."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address) and (ip.ipv4_mapped or ip.sixtofour or ip.teredo or ip in _TRANSLATED):
        return False
    return ip.is_global and not ip.is_multicast


async def _body(answer: httpx.Response) -> bytes:
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        raise ValueError("its host sends it compressed, which was not asked for")
    content = bytearray()
    async for part in answer.aiter_raw():
        content += part
        if len(content) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
    return bytes(content)
