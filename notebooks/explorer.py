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
# of weights have one bright key, and the gradients are far from those with $1/\sqrt{d_k}$.

# %%
from IPython.display import display
from ipywidgets import Dropdown, FloatSlider, IntSlider, SelectionSlider, interactive

from sdpa_lab import explore

explore.plot_explored(explore.explore(d_k=64, n=16, scale="1"))

# %% [markdown]
# ## The knobs
#
# They need a running kernel: JupyterLab with `pip install '.[notebooks]'`.


# %%
def show(**knobs):
    display(explore.plot_explored(explore.explore(**knobs)))


interactive(
    show,
    d_k=SelectionSlider(options=[2**i for i in range(2, 10)], value=64, description="d_k"),
    n=SelectionSlider(options=[2**i for i in range(2, 8)], value=16, description="n"),
    scale=Dropdown(options=list(explore.SCALES), description="scale"),
    correlation=FloatSlider(min=0, max=1, step=0.05, description="correlation"),
    seed=IntSlider(min=0, max=99, description="seed"),
    input=Dropdown(options=explore.INPUTS, description="input"),
)
