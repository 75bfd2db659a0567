"""Forecasts from similar days of the past: attention on labelled arrays, by xarray and Dask.

python examples/analogues.py [--days 3000] [--stations 6]

What followed after three days like the last three? Each day is a query, the days before it are the
keys, and the value of a key is the change to the day after it: Nadaraya and Watson's estimate
(1964) with a Gaussian kernel. The series are synthetic.

Needs pip install '.[dask]' xarray.
"""

import argparse

import numpy as np

import sdpa

SPELL = 3
WIDTH = 1.5
"""The width of the kernel, in degrees."""


def main():
    options = parse()
    try:
        import xarray
    except ImportError:
        raise SystemExit("analogues.py needs xarray: pip install '.[dask]' xarray") from None
    rng = np.random.default_rng(0)
    days = np.datetime64("2015-01-01") + np.arange(options.days)
    temperature = xarray.DataArray(
        made_up(rng, options.stations, options.days),
        dims=("station", "day"),
        coords={"station": [f"S{n}" for n in range(options.stations)], "day": days},
    )
    spells = temperature.rolling(day=SPELL).construct("lag").isel(day=slice(SPELL - 1, -1))
    after = temperature.shift(day=-1).isel(day=slice(SPELL - 1, -1))

    eager = forecast(xarray, spells, after)
    lazy = forecast(xarray, spells.chunk(station=2), after.chunk(station=2))
    print(lazy.sel(station="S1"))
    print(f"\nfrom chunks of two stations the same bits: {bool((lazy.compute() == eager).all())}")
    year = slice(365, None)  # a year to learn from
    for name, guess in (("analogues", eager), ("the day before", spells.isel(lag=-1))):
        miss = (guess - after).isel(day=year)
        print(f"{name:15s} {float(np.sqrt((miss**2).mean())):.2f} degrees off (root mean square)")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--days", type=int, default=3000)
    parser.add_argument("--stations", type=int, default=6)
    return parser.parse_args()


def made_up(rng, stations, days):
    """A season, and weather that depends on the last two days."""
    season = 10 - 9 * np.cos(2 * np.pi * (np.arange(days) - 15) / 365.25)
    weather = np.zeros((stations, days))
    for day in range(2, days):
        noise = rng.standard_normal(stations)
        weather[:, day] = 1.1 * weather[:, day - 1] - 0.4 * weather[:, day - 2] + 2 * noise
    return (season + weather).astype(np.float32)


def forecast(xarray, spells, after):
    """The next day of each station, with the labels of `spells`; lazy if that is."""
    last = spells.isel(lag=-1)
    change = (after - last).expand_dims(what=1).transpose("station", "day", "what")
    keys = {"day": "past"}
    return last + xarray.apply_ufunc(
        attend,
        spells,
        spells.rename(keys),
        change.rename(keys),
        input_core_dims=[["day", "lag"], ["past", "lag"], ["past", "what"]],
        output_core_dims=[["day"]],
        dask="parallelized",
        output_dtypes=[np.float32],
    )


def attend(query, key, value):
    """exp(-|q - k|^2 / (2 WIDTH^2)) of days before is a softmax: |q|^2 cancels, |k|^2 is a bias."""
    bias = -(key**2).sum(axis=-1) / (2 * WIDTH**2)
    return sdpa.attention(
        query, key, value, bias[..., None, :],
        scale=WIDTH**-2, is_causal=True, query_offset=-1,
    )[..., 0]  # fmt: skip


if __name__ == "__main__":
    main()
