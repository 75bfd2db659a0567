"""Results of the benchmarks, made up."""

from benchmarks.results import Results


def run_of(records, isa="avx2", processor="CPU", threads=1):
    """Results of one run with these {(group, name): {contender: (seconds, flops, bytes)}}."""
    return Results(
        [
            {
                "threads": threads,
                "isa": isa,
                "quick": False,
                "date": "2026-01-31",
                "machine": {"processor": processor, "system": "OS", "sdpa": {"version": "1.2"}},
                "peers": {"torch": "1", "ort": "2"},
                "missing": ["jax"],
                "peak": {"avx2_f32": 100.0, "avx512_f32": 200.0, "read_GBps": 10.0},
                "records": [
                    {
                        "group": group,
                        "name": name,
                        "contenders": {
                            who: {"rounds": [2 * s, s], "flops": f, "bytes": b}
                            for who, (s, f, b) in found.items()
                        },
                    }
                    for (group, name), found in records.items()
                ],
            }
        ]
    )
