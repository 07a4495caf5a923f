"""What a body is called: its type, and the ending of a file that holds it
(docs/api.md, Results)."""

from __future__ import annotations

import re

from conveyor.domain.model import Format, Result
from conveyor.domain.params import content_type_of

_CONTENT_TYPE = re.compile(
    r"[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+(?:\s*;\s*[A-Za-z0-9!#$&^_.+-]+=[\x20-\x7e]{1,80})?\Z"
)
# Not `mimetypes`: it reads files of the machine, and calls application/xml "xsl".
_EXTENSIONS = {
    "application/gzip": "gz",
    "application/javascript": "js",
    "application/json": "json",
    "application/pdf": "pdf",
    "application/xhtml+xml": "html",
    "application/xml": "xml",
    "application/zip": "zip",
    "audio/mpeg": "mp3",
    "image/avif": "avif",
    "image/bmp": "bmp",
    "image/gif": "gif",
    "image/jpeg": "jpg",
    "image/png": "png",
    "image/svg+xml": "svg",
    "image/tiff": "tiff",
    "image/vnd.microsoft.icon": "ico",
    "image/webp": "webp",
    "text/css": "css",
    "text/csv": "csv",
    "text/html": "html",
    "text/javascript": "js",
    "text/markdown": "md",
    "text/plain": "txt",
    "text/xml": "xml",
    "video/mp4": "mp4",
    "video/webm": "webm",
}


def content_type_for(body_format: Format, result: Result) -> str:
    """The format's own type. A page that turned out to be something else keeps what it said."""
    stored = result.content_type.strip()
    says_more = stored.lower() != "text/html" and _CONTENT_TYPE.match(stored) is not None
    if body_format is Format.HTML and says_more:
        return stored
    return content_type_of(body_format)


def extension_for(content_type: str) -> str:
    """The ending of a file, without its dot; `bin` for a type that is not in the table."""
    return _EXTENSIONS.get(content_type.partition(";")[0].strip().lower(), "bin")
