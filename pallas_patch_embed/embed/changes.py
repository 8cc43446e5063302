"""How a run treats pictures that have changed since they were embedded."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from pallas_patch_embed.embed.options import Options
from pallas_patch_embed.embed.units import Picture, is_url, remote_origin

# Number of servers' answers that are waited for at a time.
REQUESTS = 64


@dataclasses.dataclass(frozen=True)
class Changes:
    """How a run treats pictures that have changed.

    Attributes:
      embedded: whether they are embedded again, instead of being reported.
      asked: whether servers are asked about pictures at URLs of which no listing has told whether
        they have changed.
    """

    embedded: bool
    asked: bool

    @classmethod
    def of(cls, options: Options) -> Self:
        return cls(options.changed == "embed", options.changed is not None)

    def looked_up(self, pictures: Iterable[Picture]) -> Iterator[Picture]:
        """Yields the pictures, with the size and time of change of those that are asked about."""
        if not self.asked:
            yield from pictures
            return
        waiting: collections.deque[Future[Picture] | Picture] = collections.deque()
        with ThreadPoolExecutor(REQUESTS) as threads:
            for picture in pictures:
                # The content of a picture that has a size can be read only before the next one.
                is_unknown = picture.size is None and not picture.origin.row
                if is_unknown and not picture.origin.modified and is_url(picture.origin.source):
                    waiting.append(threads.submit(_looked_up, picture))
                    if len(waiting) < REQUESTS:
                        continue
                else:
                    waiting.append(picture)
                while waiting and (len(waiting) >= REQUESTS or isinstance(waiting[-1], Picture)):
                    yield _result(waiting.popleft())
            while waiting:
                yield _result(waiting.popleft())


def _result(picture: Future[Picture] | Picture) -> Picture:
    return picture if isinstance(picture, Picture) else picture.result()


def _looked_up(picture: Picture) -> Picture:
    import fsspec

    try:
        # The id has the parameters that sign the URL, and the source does not.
        fs, path = fsspec.url_to_fs(picture.id)
        return picture._replace(origin=remote_origin(picture.id, fs.info(path)))
    except Exception:  # Each package for URLs has its own kinds of errors.
        return picture  # Opening it gives the reason.
