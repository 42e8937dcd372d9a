"""The compiled core (src/tensortap/native). Addresses are plain integers; see native/README.md."""

def summarize(
    ptr: int,
    n: int,
    dtype: int,
    out_ptr: int,
    histogram_ptr: int = 0,
    threads: int = 0,
    isa: int = -1,
) -> None: ...
def copy(dst: int, src: int, nbytes: int, threads: int = 0) -> None: ...
def digest(src: int, nbytes: int, threads: int = 0) -> bytes: ...
def copy_digest(dst: int, src: int, nbytes: int, threads: int = 0) -> bytes: ...
def plain_read(ptr: int, nbytes: int, threads: int = 0) -> int: ...
def difference(
    reference: int,
    reference_dtype: int,
    candidate: int,
    candidate_dtype: int,
    n: int,
    rtol: float,
    atol: float,
    out_ptr: int,
    percentiles: Percentiles | None = None,
    threads: int = 0,
    isa: int = -1,
) -> None: ...
def profile(
    reference: int,
    reference_dtype: int,
    candidate: int,
    candidate_dtype: int,
    rows: int,
    width: int,
    tokens_ptr: int,
    channels_ptr: int,
    threads: int = 0,
    isa: int = -1,
) -> None: ...

RUN: int

class Percentiles:
    """Exact percentiles of a stream: `sample` it, `plan`, pass it to `difference`, then `settle`,
    and as long as that says False, `scan` the stream again."""

    def __init__(self, total: int) -> None: ...
    def sample(
        self,
        reference: int,
        reference_dtype: int,
        candidate: int,
        candidate_dtype: int,
        n: int,
        threads: int = 0,
        isa: int = -1,
    ) -> None: ...
    def places(self, n: int) -> list[int]: ...
    def sample_runs(
        self,
        reference: int,
        reference_dtype: int,
        candidate: int,
        candidate_dtype: int,
        n: int,
        isa: int = -1,
    ) -> None: ...
    def plan(self) -> None: ...
    def scan(
        self,
        reference: int,
        reference_dtype: int,
        candidate: int,
        candidate_dtype: int,
        n: int,
        threads: int = 0,
        isa: int = -1,
    ) -> None: ...
    def settle(self, finite: int) -> bool: ...
    def values(self) -> list[float]: ...
    def histogram(self, out_ptr: int) -> None: ...

def isa() -> str: ...
def isas() -> list[str]: ...
def openmp() -> bool: ...
