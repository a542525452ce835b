"""What the tables of the README and of docs/ say of records: functions from records to lines of Markdown."""

from collections.abc import Iterable, Sequence
from statistics import median

from xfuser_cocodiff.bench import runs
from xfuser_cocodiff.bench.runs import Record
from xfuser_cocodiff.reporting.words import decibels, size, spread, time
from xfuser_cocodiff.settings.options import EXACT
from xfuser_cocodiff.simulation import emulated
from xfuser_cocodiff.simulation.scenario import STOCK


def speed(records: Sequence[Record]) -> list[str]:
    """Times over stock by its share, and the bound of each."""
    modes = list(dict.fromkeys(mode for _, rows in _by_share(records) for mode in rows if mode != STOCK))
    return _table(
        ["share", *_names(modes)],
        (
            [_share(rows), *(_beside_bound(stock, rows[mode]) if mode in rows else "" for mode in modes)]
            for stock, rows in _by_share(records)
        ),
    )


def ring(records: Sequence[Record]) -> list[str]:
    """The same, where a part of the degree is a ring, or all of it."""
    return _table(
        ["Ulysses x Ring", "share of stock's step", "`exact`", "`balanced`"],
        (
            [runs.RINGS[rows["exact"]["ring"]], _share(rows), *_ratios(stock, rows)]
            for record in records
            for stock, rows in _by_share([record])
        ),
    )


def compiled(records: Sequence[Record]) -> list[str]:
    """The same in compiled graphs."""
    return _table(
        ["share", "stock's step", "`exact`", "`balanced`"],
        ([_share(rows), spread(stock), *_ratios(stock, rows)] for stock, rows in _by_share(records)),
    )


def worth(records: Sequence[Record]) -> list[str]:
    """Steps by each overlap."""
    [(_, rows)] = _by_share(records)

    def cell(mode: str, fixed: str) -> str:
        row = rows.get(f"{mode}/flat*{fixed}")
        if row is None:
            return ""
        found = "" if fixed else f", {'; '.join(dict.fromkeys(row['schedules'].values()))}"
        return f"{spread(row['step_seconds'])}{found}"

    return _table(
        [f"at a share of {_share(rows)}", "`exact`", "`balanced`"],
        ([name, cell("exact", fixed), cell("balanced", fixed)] for name, fixed in runs.OVERLAPS.items()),
    )


def held(records: Sequence[Record]) -> list[str]:
    """Measured steps, and what is simulated over that."""
    cells: dict[tuple[str, str], dict[str, emulated.Cell]] = {}
    for record in records:
        for cell in emulated.held_against(record):
            tokens, share = str(record["shape"]["tokens"]), f"{cell.share:.2f}"
            cells.setdefault((tokens, share), {})[cell.mode] = cell
    names = list(dict.fromkeys(mode for found in cells.values() for mode in found))

    def told(cell: emulated.Cell | None) -> str:
        return f"{time(cell.measured)}, {cell.ratio:.2f}" if cell else ""

    rows = ([*known, *(told(found.get(name)) for name in names)] for known, found in cells.items())
    return _table(["tokens", "share", *_names(names)], rows)


def small(records: Sequence[Record]) -> list[str]:
    """Short exchanges of many ranks."""
    lines = []
    for record in records:
        for nbytes in dict.fromkeys(row["bytes_per_rank"] for row in record["rows"]):
            rows = {row["algorithm"]: row for row in record["rows"] if row["bytes_per_rank"] == nbytes}
            stock, auto, flat = (rows[name]["seconds"] for name in (STOCK, "auto", "flat"))
            taken = f"{_with_range(auto, stock)} by `{rows['auto']['plan']}`"
            lines.append([f"{nbytes / 1024:.0f} KB", spread(stock), taken, _with_range(flat, stock)])
    return _table(["of a rank", "stock", "`auto`, of stock's time", "`flat`"], lines)


def first(records: Sequence[Record]) -> list[str]:
    """Denoising of an unmodified command, in the first run of a machine and in a later one."""
    lines = []
    for record in records:
        for number, run in ((0, "first"), (-1, "third")):
            stock, *others = [sum(side["step_seconds_all"][number]) for side in record["runs"]]
            cells = [f"{taken:.1f} s, {stock / taken:.2f}" for taken in others]
            lines.append([f"scale {_option(record, '--scale')}", run, f"{stock:.1f} s", *cells])
    return _table(["links", "run", *_names(side["name"] for side in records[0]["runs"])], lines)


def modes(records: Sequence[Record]) -> list[str]:
    """What each mode sends, and what that costs: records of long runs, one of pictures and one of videos, then of short
    ones."""

    def row(mode: str) -> list[str]:
        cells = []
        for both in (records[:2], records[2:]):
            found = [next(row for row in record["rows"] if row["mode"] == mode) for record in both]
            cells += [_sent(found), *(decibels(row["psnr_db_mean"]) for row in found)]
        return [f"`{mode}`", *cells]

    kinds, names = ["bytes", "pictures", "videos"], [row["mode"] for row in records[0]["rows"]]
    exact = [f"`{EXACT}`", *["1", "equal", "equal"] * 2]
    return _table(["mode", *kinds, *(f"8 steps: {kind}" for kind in kinds)], [exact, *map(row, names)])


def _sent(rows: Sequence[Record]) -> str:
    """Shares of the exact bytes, which differ by model where text is long."""
    return " / ".join(dict.fromkeys(f"{row['bytes_slow_fraction']:.2f}" for row in rows))


def quality(records: Sequence[Record]) -> list[str]:
    """The same for all numbers of steps, with what else is judged."""
    return _table(
        ["model", "steps", "mode", "bytes", "PSNR, dB", "SSIM", "inpainting, dB: block / centre (stock)"],
        (
            [
                *(_option(record, "--model"), _option(record, "--steps"), f"`{row['mode']}`"),
                *(f"{row['bytes_slow_fraction']:.3f}", f"{row['psnr_db_mean']:.1f} ± {row['psnr_db_sd']:.1f}"),
                f"{row['ssim_mean']:.4f}",
                " / ".join(f"{each['psnr_db']:.2f} ({each['psnr_db_stock']:.2f})" for each in row["inpaint"].values()),
            ]
            for record in records
            for row in record["rows"]
        ),
    )


def kernels(records: Sequence[Record]) -> list[str]:
    """What codes and moves values, against a copy."""
    return _table(
        ["of a rank's Q, K, V or O", "kernel", "touched", "GB/s", "of a copy's speed"],
        (
            [
                *(f"{row['model']}, {row['resolution']} px", row["kernel"], size(row["bytes"])),
                *(f"{median(row['bytes_per_second']) / 1e9:.1f}", f"{median(row['ratio_to_copy']):.2f}"),
            ]
            for record in records
            for row in record["rows"]
        ),
    )


def host_calls(records: Sequence[Record]) -> list[str]:
    """What the exchanges of a layer take of the host."""
    [record] = records
    return _table(
        ["", *_names(calls["mode"] for calls in record["host_calls"])],
        [["exchanges of a layer", *(spread(calls["seconds"]) for calls in record["host_calls"])]],
    )


def ring_quality(records: Sequence[Record]) -> list[str]:
    """What codes cost in a ring, and beside one."""

    def cell(row: Record) -> str:
        return f"{row['bytes_slow_fraction']:.3f}, {decibels(row['psnr_db_mean'])}"

    names = [f"`{row['mode']}`" if not row["codec"] else f"`{row['codec']}`" for row in records[0]["rows"]]
    return _table(
        ["bytes, PSNR", *names],
        ([name, *map(cell, record["rows"])] for name, record in zip(("ring", "all-to-all"), records, strict=True)),
    )


def ranks(records: Sequence[Record]) -> list[str]:
    """Simulated times over stock's fastest split, of many ranks."""
    lines = []
    for record in records:
        stock, found = record["stock"], {row["mode"]: row for row in record["modes"]}
        speedups = [f"{found[mode]['speedup']:.2f}" for mode in ("exact", "balanced", "fast")]
        cluster = f"`{record['machine']}`, {runs.CLUSTERS[record['machine']]}"
        splits = [_split(row) for row in (stock, found["balanced"])]
        lines.append([cluster, str(record["degree"]), time(stock["step_seconds"]), *splits, *speedups])
    columns = ["cluster", "ranks", "stock's step", "its split", "ours"]
    return _table([*columns, *_names(("exact", "balanced", "fast"))], lines)


def rings_on_paper(records: Sequence[Record]) -> list[str]:
    """Simulated steps of every split, the fastest of each mode in bold."""
    columns: list[str] = []
    cells: dict[str, list[str]] = {STOCK: []}
    for number, record in enumerate(records):
        mode = record["splits"][0]["mode"]
        columns.append(f"{record['degree']} ranks: `{mode}`")
        theirs = record["stock"]
        cells[STOCK].append(f"{time(theirs['step_seconds'])}, {_split(theirs)}" if mode == EXACT else "")
        for place, row in enumerate(record["splits"]):  # the fastest first
            rest = cells.setdefault(_split(row), [""] * number)
            if len(rest) == number:  # else of a placement that is not as fast
                rest.append(time(row["step_seconds"]) if place else f"**{time(row['step_seconds'])}**")
        for rest in cells.values():
            rest += [""] * (number + 1 - len(rest))
    names = sorted(cells, key=lambda name: [] if name == STOCK else [int(degree) for degree in name.split(" x ")])
    return _table(["Ulysses x Ring", *columns], ([name, *cells[name]] for name in names))


def _split(row: Record) -> str:
    return f"{row['ulysses']} x {row['ring']}"


def _by_share(records: Sequence[Record]) -> list[tuple[list[float], dict[str, Record]]]:
    """For each share stock's seconds, and the rows of all sides."""
    found = []
    for record in records:
        for asked in dict.fromkeys(row["share_asked"] for row in record["rows"]):
            rows = {row["mode"]: row for row in record["rows"] if row["share_asked"] == asked}
            found.append((rows[STOCK]["step_seconds"], rows))
    return found


def _share(rows: dict[str, Record]) -> str:
    return f"{rows[STOCK]['share']:.2f}"


def _ratios(stock: Sequence[float], rows: dict[str, Record]) -> list[str]:
    return [_with_range(stock, rows[mode]["step_seconds"]) for mode in ("exact", "balanced")]


def _beside_bound(stock: Sequence[float], row: Record) -> str:
    cell = _with_range(stock, row["step_seconds"])
    if row["mode"] == "paper":  # it sends less and less during a run: one bound would say little
        return cell
    return f"{cell} of {median(stock) / row['bound_seconds']:.2f}"


def _with_range(some: Sequence[float], others: Sequence[float]) -> str:
    """Some seconds over others that were measured in turns with them."""
    ratios = sorted(a / b for a, b in zip(some, others, strict=True))
    return f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def _option(record: Record, name: str) -> str:
    words = record["command"].split()
    return words[words.index(name) + 1]


def _names(modes: Iterable[str]) -> list[str]:
    return [mode if mode == STOCK else f"`{mode}`" for mode in modes]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    return [lines[0], "|---" * len(columns) + "|", *lines[1:]]
