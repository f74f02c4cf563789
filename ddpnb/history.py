"""What was logged, as arrays: `run.history["loss"]`.

Runs in: kernel
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .series import Series

if TYPE_CHECKING:
    import pandas as pd

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class History(Mapping[str | tuple[str, int], Floats]):
    """The logged values of a run, live while it goes on.

    history["loss"]         # mean over the ranks, (steps,)
    history["loss", 1]      # what rank 1 logged, (points,)
    history.steps("loss")   # where the means stand, (steps,)
    """

    def __init__(self, series: Mapping[str, Mapping[int, Series]]) -> None:
        self._series = series

    def __getitem__(self, key: str | tuple[str, int]) -> Floats:
        """Values by name, float64. A name alone: at each step the mean over the ranks that logged it there.

        Raises:
            KeyError: nothing was logged under that name (on that rank); the text says what was.
        """
        if isinstance(key, tuple):
            name, rank = key
            if rank not in self._of(name):
                raise KeyError(f"rank {rank} logged no {name!r}; ranks that did: {sorted(self._of(name))}")
            return _columns(self._of(name)[rank])[1]
        return self._means(key)[1]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._series))

    def __len__(self) -> int:
        return len(self._series)

    def __contains__(self, key: object) -> bool:
        name, rank = key if isinstance(key, tuple) else (key, None)
        return name in self._series and (rank is None or rank in self._series[name])

    def __repr__(self) -> str:
        names = ", ".join(f"{name} ({max(map(len, ranks.values()))})" for name, ranks in self._series.items())
        return f"<history: {names or 'nothing logged'}>"

    def steps(self, name: str, rank: int | None = None) -> Integers:
        """The steps at which `name` was logged, int64, of the same length as the values.

        Args:
            name: what was logged.
            rank: one rank; None: those of the means.
        """
        return self._means(name)[0] if rank is None else _columns(self._of(name)[rank])[0]

    def to_pandas(self) -> pd.DataFrame:
        """All points: columns name, rank, step, value, and seconds since the first of them. Needs pandas."""
        try:
            import pandas as pd
        except ImportError:
            raise ImportError("to_pandas() needs pandas: pip install pandas") from None

        rows: dict[str, list[Any]] = {"name": [], "rank": [], "step": [], "value": [], "seconds": []}
        for name in self:
            for rank, series in sorted(self._of(name).items()):
                steps, values, times = series.columns()
                rows["name"] += [name] * len(times)
                rows["rank"] += [rank] * len(times)
                rows["step"] += steps
                rows["value"] += values
                rows["seconds"] += times
        frame = pd.DataFrame(rows)
        frame["seconds"] -= frame["seconds"].min()
        return frame

    def _of(self, name: str) -> Mapping[int, Series]:
        try:
            return self._series[name]
        except KeyError:
            known = ", ".join(map(repr, self._series)) or "nothing"
            raise KeyError(f"nothing was logged under {name!r}; logged: {known}") from None

    def _means(self, name: str) -> tuple[Integers, Floats]:
        columns = [_columns(series) for series in self._of(name).values()]
        first = columns[0][0]
        if all(np.array_equal(first, steps) for steps, _ in columns):
            return first, np.mean([values for _, values in columns], axis=0)
        steps, where = np.unique(np.concatenate([steps for steps, _ in columns]), return_inverse=True)
        values = np.concatenate([values for _, values in columns])
        return steps, np.bincount(where, values) / np.bincount(where)


def _columns(series: Series) -> tuple[Integers, Floats]:
    steps, values, _ = series.columns()
    return np.frombuffer(steps, dtype=np.int64), np.frombuffer(values, dtype=np.float64)
