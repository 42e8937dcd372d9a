"""Writes a recording while the model runs on.

The caller's side takes a snapshot into a buffer and returns; a thread (`spool`) does the rest: the
summary, the bytes, the segments. What a caller can wait for is room in the arena, which is the
back-pressure, and `flush`. A writer that fails keeps the reason in `failure` and from then on takes
nothing more; the model never notices.

The same content is stored once. It is known by a 128-bit digest of its bytes, taken together with
the snapshot: that holds where object identity and version counters do not (inference tensors,
writes through `.data` or numpy, memory that the allocator used again).
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import numpy as np
import torch

from ..errors import OptionError, RecordingError, RecordingExistsError
from ..forks import make_known
from ..numerics import memory, native
from ..numerics.backend import pick
from ..numerics.histogram import Histogram
from ..numerics.summary import WIDTH
from .arena import Arena, Buffer
from .dtypes import dtype_name, from_bytes
from .ferry import Ferry
from .kinds import parse, writable
from .merge import merge_small
from .owner import this_process
from .parcel import Broken, Entry, Flush, Line, Moment, Parcel, Ready
from .pieces import address_of
from .rows import fill_row, sparse
from .schema import COMPARISON, LARGEST_MANIFEST, LIVE, MANIFEST, Manifest, Row, Site, Status
from .spool import REMEMBERED, Key, Spool
from .store import Store, open_store

__all__ = ["Writer", "discard", "now", "prepare"]

_CHUNK = 4 << 20  # small tensors share a buffer of this size
_LARGE = 1 << 20  # from here on a tensor is handed over at once

Row64 = np.ndarray[Any, Any]


def now() -> str:
    """The time as manifests write it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def prepare(store: Store, *, overwrite: bool) -> None:
    """Make the folder ready, and refuse to write over somebody's recording unasked."""
    store.make()
    old = [name for name in store.names() if name == MANIFEST or _is_segment(name)]
    if old and not overwrite:
        raise RecordingExistsError(
            f"{store.url} already holds a recording. Choose another folder, or replace it with "
            "--overwrite (overwrite=True in Python)."
        )
    for name in sorted(old, key=lambda n: n != MANIFEST):
        store.remove(name)
    if old:
        store.remove(COMPARISON)
        store.remove(LIVE)


def discard(store: Store) -> None:
    """Take away a recording that holds nothing, and its folder, if nothing else is in it."""
    prepare(store, overwrite=True)
    store.drop()


def manifest_text(manifest: Manifest) -> str:
    """A manifest as it is written; of one that no reader would take, the longest lists go."""
    data = manifest.to_dict()
    lists = [data[key] for key in ("generations", "self_checks", "skipped")]
    while True:
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
        written = text.encode("utf-8", "replace")  # a reader takes no half characters
        if len(written) <= LARGEST_MANIFEST or not any(lists):
            return written.decode()
        longest = max(lists, key=len)
        longest.clear()
        data["notes"].append(
            "The manifest had to be shortened: what generate() wrote, what self-checks found or "
            "what was not recorded is not all in it."
        )


def _named(site: Site) -> Site:
    """A site with names that a reader takes: a module may be called anything."""
    return replace(
        site,
        layer=writable(site.layer),
        leaf=writable(site.leaf),
        alias=None if site.alias is None else writable(site.alias),
        type=writable(site.type),
    )


def _is_segment(name: str) -> bool:
    return name.lstrip(".").startswith("segment-r") and ".safetensors" in name


class Writer:
    """Takes records in order of execution and turns them into a recording on disk."""

    def __init__(
        self,
        path: str,
        manifest: Manifest,
        *,
        budget: int = 1 << 30,
        overwrite: bool = False,
        histograms: bool = False,
        seal_after: float = 1.0,
        rank: int = 0,
    ) -> None:
        self.manifest = replace(manifest, writer=this_process())
        self.rank = rank
        self.store: Store = open_store(path)
        self.histograms = histograms
        self._arena = Arena(max(1 << 20, budget // 2))
        self._ferry = Ferry(self._arena, rows=not histograms)
        self._sites: list[Site] = []
        self._site_index: dict[Site, int] = {}
        self._known: OrderedDict[Key, int] = OrderedDict()
        self._next_number = 0
        self._lock = threading.Lock()
        self._parcel = Parcel()
        self._chunk = min(_CHUNK, self._arena.limit // 4)
        self._holders: list[Callable[[], None]] = []
        self._closed = False
        self._owner = os.getpid()
        make_known(self)
        backend = pick(torch.empty(0))
        self._native = native.summarize_into if backend.name == "native" else None
        try:
            if rank == 0:
                prepare(self.store, overwrite=overwrite)
                self._write_manifest()
            else:
                self.store.make()
        except OSError as error:
            raise RecordingError(
                f"Cannot write a recording to {self.store.url}: {error.strerror or error}. "
                "Choose a folder that can be written."
            ) from None
        self._spool = Spool(
            self.store,
            self._arena,
            self._sites,
            rank=rank,
            seal_size=max(1, budget // 4),
            seal_after=seal_after,
            histograms=histograms,
            pending=self._swap,
            claim=self._claim,
        )
        atexit.register(self._at_exit)

    @property
    def is_ours(self) -> bool:
        """Whether this process began the recording; in a forked child it is its parent's."""
        return os.getpid() == self._owner

    def in_child(self) -> None:
        """A forked child has the writer, without the thread that writes."""
        self._lock = threading.Lock()

    @property
    def failure(self) -> str | None:
        """Why nothing more is written, or None while all is well."""
        return self._spool.failure

    def site(self, site: Site) -> int:
        """The number under which rows refer to a site."""
        with self._lock:
            index = self._site_index.get(site)
            if index is None:
                index = self._site_index[site] = len(self._sites)
                self._sites.append(_named(site))
            return index

    def add(self, row: Row, tensor: torch.Tensor) -> None:
        """Record one tensor; its values are taken before this returns."""
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        site = Site(row.layer, row.port, row.leaf, row.alias, row.type, shape, dtype, row.device)
        moment = (row.order, row.epoch, row.batch, row.call)
        self.line(self.site(site), moment, self.take(tensor))

    def line(self, site: int, moment: Moment, number: int) -> None:
        """Say where and when a tensor that was taken stands; -1 is one that could not be taken."""
        if number >= 0:
            with self._lock:
                self._parcel.lines.append(Line(site, moment, number))

    def take(self, tensor: torch.Tensor) -> int:
        """Take a tensor's values now; the number to refer to them by, -1 after a failure.

        The values of a CUDA tensor are those at this point of its current stream: nobody waits for
        the device (see `ferry`), unless the tensor is larger than a quarter of the budget or the
        arena is full. While a graph is captured nothing is taken: -1.
        """
        nbytes = tensor.numel() * tensor.element_size()
        if self._ferry.cuda.is_here(tensor):
            return self._take_from_device(tensor, nbytes)
        if nbytes > self._arena.limit // 2:
            return self._take_direct(tensor, nbytes)
        while self._takes():
            with self._lock:
                if self._parcel.buffer is not None and self._parcel.room() >= nbytes:
                    return self._take_into(self._parcel, tensor, nbytes)
                self._hand_over()
            buffer = self._buffer(max(nbytes, self._chunk))
            if buffer is not None:
                with self._lock:
                    if self._parcel.buffer is not None:  # another thread was quicker
                        self._hand_over()
                    self._parcel.buffer = buffer
        return -1

    def _take_into(self, parcel: Parcel, tensor: torch.Tensor, nbytes: int) -> int:
        assert parcel.buffer is not None
        dtype, shape = tensor.dtype, tuple(tensor.shape)
        target = parcel.buffer.address + parcel.used
        address = address_of(tensor)
        if address:
            digest = memory.copy_digest(target, address, nbytes)
        else:
            room = memoryview(parcel.buffer.memory)[parcel.used : parcel.used + nbytes]
            copy = from_bytes(room, dtype, shape)
            with torch.no_grad():
                tensor = copy.copy_(tensor)
            digest = memory.digest(target, nbytes)
        key = (digest, nbytes, dtype)
        number = self._known.get(key, -1)
        if number >= 0:
            return number
        row = np.empty(WIDTH)
        histogram = fill_row(row, tensor, self.histograms)
        number = self._known[key] = self._number()
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        entry = Entry(number, dtype, shape, parcel.used, nbytes, row, sparse(histogram))
        parcel.keep(entry)
        if nbytes >= _LARGE or parcel.full:
            self._hand_over()
        return number

    def _take_from_device(self, tensor: torch.Tensor, nbytes: int) -> int:
        ferry = self._ferry
        if nbytes > ferry.largest:
            return -1 if ferry.cuda.capturing() else self._take_direct(tensor, nbytes)
        while self._takes() and not ferry.cuda.capturing():
            key = ferry.key(tensor)
            with self._lock:
                load = ferry.loads.get(key)
                if load is not None and load.fits(nbytes):
                    number = self._number()
                    load.keep(number, tensor, nbytes, ferry.cuda)
                    if not load.fits(nbytes):
                        self._ship(key)
                    return number
                if load is not None:
                    self._ship(key)
            buffer = self._buffer(ferry.size_for(nbytes))
            if buffer is not None:
                ferry.pin(buffer, key[0])
            if buffer is not None and not self._open_load(key, tensor, nbytes, buffer):
                ferry.lacks_room(tensor.device)
                return self._take_direct(tensor, nbytes)
        return -1

    def keep_quickly(
        self,
        tensor: torch.Tensor,
        nbytes: int,
        key: tuple[int, int],
        site: int,
        when: tuple[Callable[[], int], int, int, Callable[[], int]],
    ) -> bool:
        """`take` and `line` at once, for a plain CUDA tensor, not while a graph is captured.

        `key` is its device and stream, `when` the moment, whose order and call are asked for
        only if the tensor is taken. False, with nothing done, where it must go the long way: no
        load is open for it, or it is not for the driver to copy.
        """
        ferry = self._ferry
        with self._lock:
            load = ferry.loads.get(key)
            if load is None or not load.fits(nbytes) or not self._takes():
                return False
            number = self._number()
            if not load.keep_quickly(number, tensor, nbytes, ferry.cuda):
                return False
            order, epoch, batch, call = when
            load.lines.append(Line(site, (order(), epoch, batch, call()), number))
            if not load.fits(nbytes):
                self._ship(key)
        return True

    def _buffer(self, size: int) -> Buffer | None:
        """Room for a snapshot: this is where the model waits for the disk, and nowhere else."""
        buffer = self._arena.take(size, alive=self._is_alive, wait=False)
        if buffer is None:
            self._hand_over_all()  # what we hold ourselves must not be what we wait for
            buffer = self._arena.take(size, alive=self._is_alive)
        return buffer

    def _open_load(
        self, key: tuple[int, int], like: torch.Tensor, nbytes: int, buffer: Buffer
    ) -> bool:
        """Whether there is a load for this stream now; False where the device has no room."""
        with self._lock:
            if key in self._ferry.loads:  # another thread was quicker
                self._arena.give(buffer)
                return True
            for _ in range(2):
                try:
                    if self._ferry.open(key, like.device, nbytes, buffer) is not None:
                        return True
                except BaseException:
                    self._arena.give(buffer)
                    raise
                for other in [k for k in self._ferry.loads if k[0] == key[0]]:
                    self._ship(other)  # which makes its region one that can be taken
            self._arena.give(buffer)
            return False

    def _ship(self, key: tuple[int, int]) -> None:
        """Hand a load over, and the rows that came up meanwhile; the caller holds the lock."""
        waiting = self._parcel
        try:
            parcel = self._ferry.ship(key)
            if waiting.buffer is None and not waiting.summaries and waiting.lines:
                # In one parcel: the writer's thread lets the model run on, but not with other rows.
                parcel.lines, waiting.lines = waiting.lines + parcel.lines, []
            self._spool.put(parcel)
        except Exception as error:  # what was taken is lost: say so, but not to the model
            self._ferry.lose(key)
            self._spool.put(Broken(error))
        if waiting.buffer is None and waiting:
            self._hand_over()

    def _hand_over_all(self) -> None:
        with self._lock:
            for key in list(self._ferry.loads):
                self._ship(key)
            self._hand_over()

    def _claim(self, keys: Sequence[Key], numbers: Sequence[int]) -> list[int]:
        """The numbers under which contents are stored: these, where they are not stored yet."""
        with self._lock:
            known = [self._known.setdefault(*pair) for pair in zip(keys, numbers, strict=True)]
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return known

    def _take_direct(self, tensor: torch.Tensor, nbytes: int) -> int:
        """A tensor too large for a snapshot: it is written from where it lies, while we wait."""
        if not self._takes():
            return -1
        if tensor.is_cuda:  # the thread that reads it has a stream of its own
            torch.cuda.current_stream(tensor.device).synchronize()
        address = address_of(tensor)
        key = (memory.digest(address, nbytes), nbytes, tensor.dtype) if address else None
        done = threading.Event()
        with self._lock:
            if key is not None and key in self._known:
                return self._known[key]
            self._hand_over()
            number = self._number()
            if key is not None:
                self._known[key] = number
            entry = Entry(number, tensor.dtype, tuple(tensor.shape), 0, nbytes)
            self._spool.put(Parcel(entries=[entry], direct=tensor.detach(), done=done))
        while not done.wait(0.2):
            if not self._is_alive():
                return -1
        return number if self._is_alive() else -1

    def _number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number

    def summarize(self, site: int, moment: Moment, tensor: torch.Tensor) -> None:
        """Keep a tensor's summary alone; the tensor is read before this returns."""
        if not self._takes():
            return
        with self._lock:
            parcel = self._parcel
            index, address = parcel.next_summary()
            if (
                self._native is None
                or self.histograms
                or not native.suits(tensor)
                or not self._native(tensor, address)
            ):
                assert parcel.table is not None
                histogram = fill_row(parcel.table[index], tensor, self.histograms)
                if histogram is not None:
                    parcel.histograms[index] = histogram.sparse()
            self._add_summary(site, moment, index)

    def summary_line(
        self,
        site: int,
        moment: Moment,
        row: Row64,
        histogram: Histogram | None = None,
        sketch: Row64 | None = None,
    ) -> None:
        """Keep a raw summary row that was made before, and a sketch of the values."""
        if not self._takes():
            return
        with self._lock:
            index, _ = self._parcel.next_summary()
            assert self._parcel.table is not None
            self._parcel.table[index] = row
            if histogram is not None:
                self._parcel.histograms[index] = histogram.sparse()
            if sketch is not None:
                self._parcel.sketches[index] = sketch
            self._add_summary(site, moment, index)

    def put_rows(
        self,
        lines: Sequence[tuple[int, Moment]] | np.ndarray[Any, Any],
        table: torch.Tensor,
        ready: Ready | None = None,
        *,
        present_only: bool = False,
        sketches: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """Keep summary rows that are on their way from a device; nobody waits for them here.

        `table` is a CPU tensor of (len(lines), WIDTH) float64 that is complete once `ready` has
        been waited for: the writer's thread does that, and from then on needs the table no more.
        Lines may be an array of (site, order, epoch, batch, call), which nobody else changes.
        Without `ready` it is complete now. With `present_only`, rows whose count is 0 are dropped.
        `sketches` are a few values of the tensors behind some of the rows, complete with them.
        """
        rows = table.detach().numpy()
        if rows.shape[0] < len(lines) or rows.shape[1:] != (WIDTH,) or rows.dtype != np.float64:
            raise OptionError(
                f"{len(lines)} summary rows are ({len(lines)}, {WIDTH}) float64 numbers, but got "
                f"{table.dtype} of shape {tuple(table.shape)}. Make them with empty_rows()."
            )
        if not len(lines) or not self._takes():
            return
        if ready is None:
            rows = rows.copy()
        if not isinstance(lines, np.ndarray):
            lines = np.array([(site, *moment) for site, moment in lines], np.int64)
        parcel = Parcel(coming=lines, table=rows, ready=ready, present_only=present_only)
        for index, values in (sketches or {}).items():
            sketch = values.detach().numpy()
            parcel.sketches[index] = sketch.copy() if ready is None else sketch
        with self._lock:
            self._hand_over()
            self._spool.put(parcel)

    def on_pending(self, callback: Callable[[], None]) -> None:
        """Let `callback` hand over what it holds, whenever nothing came for a while.

        It is called by the writer's thread when that is idle, and by whoever calls `flush` or
        `close`, never under a lock of the writer's: so it may call everything that keeps records.
        """
        self._holders.append(callback)

    def _call_holders(self) -> None:
        try:
            for callback in list(self._holders):
                callback()
        except Exception as error:  # what it held is lost: say so, but not to the model
            self._spool.put(Broken(error))

    def _add_summary(self, site: int, moment: Moment, index: int) -> None:
        parcel = self._parcel
        parcel.lines.append(Line(site, moment, -1, index))
        parcel.summaries += 1
        if parcel.full:
            self._hand_over()

    def _hand_over(self) -> None:
        """Give the current parcel to the writer's thread; the caller holds the lock."""
        parcel, self._parcel = self._parcel, Parcel()
        if parcel:
            self._spool.put(parcel)
        elif parcel.buffer is not None:
            self._arena.give(parcel.buffer)

    def _swap(self) -> Parcel | None:
        """What waits here, for the writer's thread that has nothing else to do."""
        self._call_holders()
        with self._lock:
            for key in list(self._ferry.loads):
                self._ship(key)
            self._ferry.rest()
            parcel, self._parcel = self._parcel, Parcel()
        if not parcel and parcel.buffer is not None:
            self._arena.give(parcel.buffer)
        return parcel or None

    def _is_alive(self) -> bool:
        return self._spool.alive

    def _takes(self) -> bool:
        """Whether records are still taken; a forked child has no thread that would write them."""
        return self._spool.alive and not self._closed and self.is_ours

    def flush(self, *, sync: bool = False) -> None:
        """Return when everything taken so far stands in sealed segments."""
        if not self.is_ours:
            return
        self._call_holders()
        self._hand_over_all()
        done = threading.Event()
        self._spool.put(Flush(done, sync))
        while self._spool.alive and not done.wait(0.2):
            pass

    def close(self, status: Status = "complete", **updates: Any) -> None:
        """Write what is left, merge small segments, and say in the manifest how it ended.

        In a forked child nothing is touched: what is on disk is the parent's.
        """
        if self._closed or not self.is_ours:
            return
        replaced = self._is_replaced()
        if replaced:  # what is there now is another's: nothing of ours belongs to it
            self._spool.put(Broken(RecordingError("another recorder has taken over the folder")))
        self._call_holders()
        self._hand_over_all()
        self._closed = True
        atexit.unregister(self._at_exit)
        self._spool.close()
        self._give_back()
        if self._ferry.notes:
            updates["notes"] = [*updates.get("notes", ()), *self._ferry.notes]
        failure = self.failure
        if failure is None:
            try:
                merge_small(self.store, self._spool.names)
            except OSError as error:
                updates.setdefault("notes", []).append(
                    f"Small segments were left unmerged: {error.strerror or error}."
                )
        else:
            status, updates["failure"] = "failed", failure
        self.manifest = replace(self.manifest, status=status, closed=now(), **updates)
        if self.rank == 0 and not replaced:
            try:
                self._write_last_manifest()
            except OSError as error:
                self._spool.failure = failure or f"the manifest: {error.strerror or error}"

    def _give_back(self) -> None:
        try:
            self._ferry.clear()
            self._arena.clear()
        except Exception as error:  # a device that has failed
            self._ferry.say(f"Memory was not given back: {error}.")

    def _write_manifest(self) -> None:
        self.store.write_text(MANIFEST, manifest_text(self.manifest))

    def _write_last_manifest(self) -> None:
        """Say how it ended, also where no file can be made: then in the one that is there."""
        try:
            self._write_manifest()
        except OSError as error:
            try:
                self.store.rewrite(MANIFEST, manifest_text(self.manifest))
            except OSError:
                raise error from None

    def _is_replaced(self) -> bool:
        """Whether another recorder has begun at the same place since."""
        if self.rank != 0:
            return False
        try:
            found = parse(self.store.read_text(MANIFEST, LARGEST_MANIFEST))
        except (OSError, ValueError, RecordingError):
            return False
        writer = found.get("writer") if isinstance(found, dict) else None
        ours = self.manifest.writer or {}
        return isinstance(writer, dict) and writer.get("token") != ours.get("token")

    def _at_exit(self) -> None:
        """The interpreter ends with the recording open: keep what was taken."""
        if not self.is_ours:
            return
        self._call_holders()
        self._hand_over_all()
        self._closed = True
        self._spool.close()
        self._ferry.stop()
