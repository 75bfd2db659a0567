"""sdpa.interop beside PyTorch in one process: threads of both, memory, forks."""

import warnings

import pytest
from support.process import run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[peers]'")

from sdpa.interop import torch as interop

THREADS = """
import warnings
warnings.simplefilter("ignore")
import torch
import torch.nn.functional as F
from sdpa.interop import torch as interop

torch.set_num_threads(2)
sdpa.set_num_threads(3)
q, k, v = (torch.from_numpy(rng.standard_normal((4, 8, 300, 64), np.float32)) for _ in range(3))

def tasks():
    return {int(task) for task in os.listdir("/proc/self/task")}

def seconds(task):
    # CPU time of a thread of this process
    fields = open(f"/proc/self/task/{task}/stat").read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

def step(f):
    x = [y.clone().requires_grad_() for y in (q, k, v)]
    out = f(*x, is_causal=True)
    return [y.detach().numpy().tobytes() for y in (out, *torch.autograd.grad(out.sum(), x))]
"""


@pytest.mark.slow
def test_neither_number_of_threads_changes_the_other():
    run(
        THREADS
        + """
assert (torch.get_num_threads(), sdpa.get_num_threads()) == (2, 3)
first = step(interop.attention)
with interop.install():
    behind = step(F.scaled_dot_product_attention)
for theirs, ours in (1, 3), (2, 1), (3, 2):
    before = sdpa.get_num_threads()
    torch.set_num_threads(theirs)
    assert sdpa.get_num_threads() == before
    sdpa.set_num_threads(ours)
    assert (torch.get_num_threads(), sdpa.get_num_threads()) == (theirs, ours)
    assert step(interop.attention) == first
    with interop.install():
        assert step(F.scaled_dot_product_attention) == behind
    assert (torch.get_num_threads(), sdpa.get_num_threads()) == (theirs, ours)
"""
    )


@pytest.mark.slow
def test_threads_are_started_once_and_only_those_of_whose_turn_it_is_run():
    """PyTorch's workers and ours exist side by side; one pool at a time has work.

    Told by the CPU time of each thread: while sdpa computes for seconds, PyTorch's threads may add
    a few ticks of waiting, not a share of the work; then the other way round.
    """
    run(
        THREADS
        + """
before = tasks()
torch.mm(x := torch.randn(700, 700), x)          # PyTorch starts its threads
theirs = tasks() - before
step(interop.attention)                          # the prelude has started ours
ours = before - {os.getpid()}
assert ours, before
known = tasks()
assert len(theirs) <= 1, theirs                  # the caller is the other one

def work(f, least=1.0):
    # CPU seconds of the caller, of our threads and of PyTorch's
    groups = {"caller": {os.getpid()}, "ours": ours, "theirs": known - ours - {os.getpid()}}
    start = {task: seconds(task) for task in known}
    end = time.process_time() + least
    while time.process_time() < end:
        f()
    return {name: sum(seconds(t) - start[t] for t in group) for name, group in groups.items()}

spent = work(lambda: interop.attention(q, k, v))
assert spent["ours"] > 0.2 and spent["theirs"] <= 0.1 * sum(spent.values()), spent
spent = work(lambda: torch.mm(x, x))
assert spent["theirs"] > 0.2 and spent["ours"] <= 0.1 * sum(spent.values()), spent
assert tasks() == known                          # nobody started another one
"""
    )


@pytest.mark.slow
def test_backward_on_many_threads_at_once():
    """Threads of Python that differentiate at the same time share the pool, and agree."""
    run(
        THREADS
        + """
from concurrent.futures import ThreadPoolExecutor
expected = step(interop.attention)
known = len(tasks())
with ThreadPoolExecutor(4) as pool:
    found = list(pool.map(lambda _: step(interop.attention), range(12)))
assert all(each == expected for each in found)
"""
    )


# ----------------------------------------------------------------------------------- transformers

LENGTH = 5120
MODEL = f"""
import warnings
warnings.simplefilter("ignore")
import torch, transformers
from sdpa.interop.transformers import register

register()
n, heads = {LENGTH}, 2
config = transformers.Gemma2Config(
    hidden_size=16, intermediate_size=16, num_hidden_layers=2, vocab_size=64, head_dim=8,
    num_attention_heads=heads, num_key_value_heads=1, sliding_window=64,
    attn_logit_softcapping=2.0, pad_token_id=0, max_position_embeddings=n)
model = transformers.Gemma2Model(config)
model.set_attn_implementation(NAME)

def forward(m):
    tokens = torch.randint(2, 64, (2, m or n))
    padding = torch.ones_like(tokens)
    padding[1, :7] = 0
    out = model(tokens, attention_mask=padding, use_cache=False).last_hidden_state
    (grad,) = torch.autograd.grad(out.square().sum(), [model.embed_tokens.weight])
    return grad.numpy()

grown = peak(forward)
mask = 2 * n * n  # bytes of one boolean mask, the smallest matrix of Lq x Lk
"""


@pytest.mark.slow
@pytest.mark.uninstrumented
def test_transformers_without_any_matrix_of_lq_by_lk():
    """Padded, with windows, forward and backward: the whole model takes less than one mask."""
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[peers]'")
    run(MODEL.replace("NAME", "'c_attention'") + "assert grown < mask, (grown, mask)")
    # The measurement would see one: transformers' own attention has several.
    eager = MODEL.replace("NAME", "'eager'").replace(f" {LENGTH},", " 2048,")
    assert eager.count("2048") == 1
    run(eager + "assert grown > 4 * mask, (grown, mask)")


# ------------------------------------------------------------------------------------- processes


class Rows(torch.utils.data.Dataset):
    """Items that attention computes in the worker's process, with their gradients."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        q = torch.full((2, 64, 8), float(i), requires_grad=True)
        out = interop.attention(q, q, q, workers=2)
        (grad,) = torch.autograd.grad(out.sum(), q)
        return out.detach(), grad


@pytest.mark.forks
@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers_of_a_data_loader(context):
    """The parent has used its threads before it forks."""
    expected = [Rows()[i] for i in range(4)]
    loader = torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context=context)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads
        found = list(loader)
    for batch, item in zip(found, expected, strict=True):
        assert all(torch.equal(x[0], y) for x, y in zip(batch, item, strict=True))


@pytest.mark.forks
def test_fork():
    """A child gets its parent's results, forward and backward, by the function and by install."""
    run(
        THREADS
        + """
expected = step(interop.attention)
interop.install()
behind = step(F.scaled_dot_product_attention)

def child():
    torch.set_num_threads(1)  # OpenMP does not outlive a fork; ours does
    assert step(interop.attention) == expected
    assert step(F.scaled_dot_product_attention) == behind

check_child(in_child(child), "fork")
assert step(interop.attention) == expected
"""
    )
