# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Turn the scale
#
# One head of attention, computed by the C routines. Move a slider: scores, weights and gradients
# are computed anew. Points are this one draw. Curves are laws: the density of scores of independent
# rows, and entropy and Jacobian of $n$ independent normal scores (quadratures of
# `sdpa_lab.theory`).
#
# Without Jupyter: `python -m sdpa explorer` writes a page that does the same in a browser.

# %% [markdown]
# ## What it shows
#
# Without a kernel, as on GitHub, this is one setting: $d_k = 64$, 16 tokens, no scale. Most rows
# of weights have one bright key, and the gradients are far from those with $1/\sqrt{d_k}$. A law is
# that of the mean over draws. Where few rows get most of the gradient, one draw is often far from
# it: here that of dL/dQ has 9.56 and its law 16.5, and other draws scatter as much.

# %%
from IPython.display import display
from ipywidgets import (
    Dropdown,
    FloatLogSlider,
    FloatSlider,
    IntSlider,
    Play,
    SelectionSlider,
    VBox,
    interactive_output,
)

import sdpa.plot
from sdpa_lab import explore

one = explore.explore(d_k=64, n=16, scale="1")
explore.plot_explored(one)

# %% [markdown]
# The weights again, as a page inside this one: point at a pair, or move over the map with the
# arrow keys.

# %%
sdpa.plot.view(one.weights)

# %% [markdown]
# ## The knobs
#
# They need a running kernel: JupyterLab with `pip install '.[notebooks]'`. The list sets the scale
# to a named one, the slider to any, and the button plays it from $2^{-10}$ to 4.


# %%
def show(**knobs):
    display(explore.plot_explored(explore.explore(**knobs)))


def named(change):
    if names.value in explore.SCALES:
        scale.value = explore.SCALES[names.value](d_k.value)


def slid(change):
    if names.value in explore.SCALES and scale.value != explore.SCALES[names.value](d_k.value):
        names.value = "by the slider"


def played(change):
    scale.value = 2 ** (play.value / 4)


d_k = SelectionSlider(options=[2**i for i in range(2, 10)], value=64, description="d_k")
names = Dropdown(options=[*explore.SCALES, "by the slider"], description="named")
scale = FloatLogSlider(value=1 / 8, base=2, min=-10, max=2, step=0.05, description="scale")
play = Play(min=-40, max=8, value=-40, interval=700, description="play the scale")
knobs = {
    "d_k": d_k,
    "n": SelectionSlider(options=[2**i for i in range(2, 8)], value=16, description="n"),
    "scale": scale,
    "correlation": FloatSlider(min=0, max=1, step=0.05, description="correlation"),
    "seed": IntSlider(min=0, max=99, description="seed"),
    "input": Dropdown(options=explore.INPUTS, description="input"),
}
for knob, turned in (names, named), (d_k, named), (scale, slid), (play, played):
    knob.observe(turned, "value")
VBox([names, play, *knobs.values(), interactive_output(show, knobs)])
