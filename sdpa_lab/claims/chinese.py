"""One sentence in Chinese per row, for the verdict that it was written for."""

from collections.abc import Iterable

from .record import VERDICTS, Figure, Row

FINDINGS: dict[str, tuple[str, str]] = {
    "mean-var": (
        "reproduced",
        "均值为 0、方差为 d_k，对任何满足条件的分布都成立：标准差在 d_k = 64 时为 "
        "{std raw d_k=64:.2f}，512 时为 {std raw d_k=512:.2f}。",
    ),
    "unit-var": (
        "reproduced",
        "独立分量的缩放后方差为 1，与 d_k 和 n 无关：d_k = 16 时为 "
        "{variance scaled d_k=16 n=64:.3f}，512 时为 {variance scaled d_k=512 n=64:.3f}；训练之后"
        "则不然。",
    ),
    "product-var": (
        "reproduced",
        "公式成立；但键的均值对整行相同，softmax 不受其影响：键的均值为 2 时，总方差为 "
        "{variance over d_k, key mean 2:.2f} d_k，行内方差仍为 "
        "{variance within a row over d_k, key mean 2:.2f} d_k。",
    ),
    "normal": (
        "reproduced",
        "近似成立：与正态分布的 Kolmogorov 距离为 0.1376/d_k，超额峰度为 6/d_k（d_k = 4 时为 "
        "{excess kurtosis d_k=4:.2f}，64 时为 {excess kurtosis d_k=64:.2f}）。",
    ),
    "three-sigma": (
        "reproduced",
        "在所印位数内成立；d_k 较小时尾部更重，d_k = 16 时有 {share scaled within 3, d_k=16:.2%} "
        "落在三倍标准差之内（正态分布为 99.73%）。d_k = 512 时，分数超过 100 的概率为 "
        "{probability that a score is beyond 100, d_k=512:.1e}。",
    ),
    "init-var": (
        "reproduced",
        "若 1/sqrt(dim) 是方差则成立；若是标准差，则方差为 1/dim（dim = 64 时为 "
        "{variance of q k, 1/sqrt(dim) the std, dim=64:.4f}）。",
    ),
    "toy-512": (
        "reproduced",
        "平均而言成立（{std raw d_k=512, mean of tensors:.1f} 与 "
        "{std scaled d_k=512, mean of tensors:.2f}）；但单个张量只有 18 个分数，波动很大：小于"
        " 20 的概率为 {share of tensors with a std below 20:.2f}，大于 25 的概率为 "
        "{share of tensors with a std above 25:.2f}。",
    ),
    "toy-var": (
        "reproduced",
        "平均值成立；但同行同列的分数相关，d_k = 64 时单次打印的误差为 "
        "{std of one printed variance over d_k, d_k=64:.1%}，而一万个独立的分数只会有 1.4%。",
    ),
    "softmax-raw": ("reproduced", "在所印位数内成立：最大的权重只比 1 小 {weight 4:.1e}。"),
    "softmax-scaled": (
        "corrected",
        "所印的数之和为 2，不可能是权重；正确值为 {weight 1:.3f}、{weight 2:.3f}、"
        "{weight 3:.3f}、{weight 4:.3f}、{weight 5:.3f}。",
    ),
    "scaled-derivative": (
        "corrected",
        "最小的 p(1-p) 只有 {smallest p(1-p):.4f}，是所称下界的五分之一；即使按笔记所印的权重计"
        "算，也只有 {smallest p(1-p) of the printed weights:.4f}。",
    ),
    "exp-digits": (
        "reproduced",
        "七个数值在所印位数内都正确。",
    ),
    "exp-50": (
        "reproduced",
        "四种浮点类型中只有 float16 如此，它到 e^{x at which e^x leaves float16:.2f} 为止；"
        "bfloat16 与 float32 到 e^{x at which e^x leaves float32:.1f}，float64 到 e^"
        "{x at which e^x leaves float64:.1f}。",
    ),
    "jacobian": (
        "reproduced",
        "公式对任何 n、平坦或尖锐的行都成立，与中心差分相差 "
        "{formula against differences, n=10 std=8:.0e}。",
    ),
    "saturated": (
        "reproduced",
        "在可印的位数内成立：其余权重为 {weight 2:.1e}，雅可比的最大元素约为 1.6e-21。",
    ),
    "shift": (
        "reproduced",
        "两点都成立：差别只是舍入误差（{largest relative difference, float64, n=64:.0e}）；分数的"
        "标准差为 50 时，float32 中不减最大值有 {rows not finite, plain, std 50, float32:.0%} 的"
        "行溢出，减去之后没有。",
    ),
    "overflow-64": (
        "corrected",
        "分数本身在任何类型中都不会溢出。会溢出的是不减最大值时的指数，而且只在 float16 中（每"
        "行 16 个分数时，{share of rows with e^s beyond float16:.0%} 的行如此）。缩放防止的是饱"
        "和，不是溢出。",
    ),
    "numerical-stability": (
        "corrected",
        "按数值分析的含义并非如此：减去最大值之后，有无缩放都是稳定的。不缩放时，float32 输出的"
        "相对误差在 d_k = 64 时为缩放时的 {error unscaled over scaled, d_k=64:.1f} 倍，512 时为"
        " {error unscaled over scaled, d_k=512:.1f} 倍，不到一位十进制数。",
    ),
    "entropy-table": (
        "corrected",
        "趋势正确，数值有误：不缩放为 {entropy unscaled d_k=16:.2f}、"
        "{entropy unscaled d_k=64:.2f}、{entropy unscaled d_k=256:.2f}，缩放后为 "
        "{entropy scaled d_k=16:.2f}、{entropy scaled d_k=64:.2f}、{entropy scaled d_k=256:.2f}；"
        "2.3 即 ln 10，是权重全部相等时的熵。",
    ),
    "maxweight-table": (
        "corrected",
        "趋势正确，数值有误：d_k = 16、64、256 时，未缩放的最大权重为 "
        "{max weight unscaled d_k=16:.3f}、{max weight unscaled d_k=64:.4f}、"
        "{max weight unscaled d_k=256:.5f}，缩放后为 {max weight scaled d_k=16:.2f}、"
        "{max weight scaled d_k=64:.2f}、{max weight scaled d_k=256:.2f}；笔记中缩放的一列接近"
        "除以 2 sqrt(d_k) 的结果。",
    ),
    "grad-law": (
        "corrected",
        "未缩放时均方根反而增大（n = 10 时指数为 {exponent of rms |dL/dQ|, unscaled n=10:.2f}）"
        "，而典型的行趋于零：没有梯度的行由 d_k = 16 时的 "
        "{dead of dL/dQ, unscaled d_k=16 n=10:.0%} 增至 1024 时的 "
        "{dead of dL/dQ, unscaled d_k=1024 n=10:.0%}。",
    ),
    "grad-constant": (
        "reproduced",
        "d_v 固定时成立：均方根的指数为 {exponent of rms |dL/dQ|, scaled n=10:.3f}（n = 10）。"
        "若 d_v = d_k，损失为 sum(g * out)，它就随 g 的范数一起增大，指数为 "
        "{exponent of rms |dL/dQ|, scaled n=10, d_v = d_k:.2f}。",
    ),
    "steadier-gradients": (
        "reproduced",
        "成立：d_k = 64 时，各行 |dL/dq| 的标准差与均值之比，缩放时为 "
        "{spread of |dL/dQ| over its mean, scaled d_k=64:.2f}，不缩放时为 "
        "{spread of |dL/dQ| over its mean, unscaled d_k=64:.2f}：少数几行占去了几乎全部梯度。",
    ),
    "sqrt-optimal": (
        "reproduced",
        "按笔记的定义成立：只有 1/2 次幂使方差在任何宽度下都为 1。d_k = 64 时，除以 d_k^(1/4)、"
        "sqrt(d_k)、d_k^(3/4) 的方差为 {variance divided by d_k^(1/4), d_k=64:.2f}、"
        "{variance divided by d_k^(2/4), d_k=64:.2f}、"
        "{variance divided by d_k^(3/4), d_k=64:.3f}。但方差为 1 并不等于学得最好。",
    ),
    "optimal-region": (
        "corrected",
        "10 个键时成立，键更多时不成立：传到分数的梯度是可能的最大值的 "
        "{|dL/dS| divided by sqrt(d_k) over the largest, d_k=64 n=10:.2f}、"
        "{|dL/dS| divided by sqrt(d_k) over the largest, d_k=64 n=64:.2f}、"
        "{|dL/dS| divided by sqrt(d_k) over the largest, d_k=64 n=1024:.2f}（10、64、1024 个键"
        "）。",
    ),
    "dk-variance": (
        "reproduced",
        "训练之前成立：d_k = 64 时，方差的 d_k 倍为 "
        "{variance times d_k, divided by d_k, d_k=64:.3f}。",
    ),
    "dk-even": (
        "reproduced",
        "开始时成立：d_k = 64 时，熵达到均匀分布的 {entropy over ln n, d_k=64 n=64:.1%}。训练之"
        "后是否有害，是另一个问题。",
    ),
    "two-sqrt-variance": (
        "reproduced",
        "成立：d_k = 64 时方差为 {variance divided by 2 sqrt(d_k), d_k=64:.3f}。",
    ),
    "log-saturates": (
        "corrected",
        "取决于 d_k 和键的个数：d_k = 64 时，10 个键的最大权重为 "
        "{largest weight divided by ln d_k, d_k=64 n=10:.2f}，64 个键只有 "
        "{largest weight divided by ln d_k, d_k=64 n=64:.2f}；d_k = 512 时，64 个键仍有 "
        "{largest weight divided by ln d_k, d_k=512 n=64:.2f}。",
    ),
    "infer-smaller": (
        "reproduced",
        "成立：缩放减小到四分之一，损失增加 {loss added with a quarter of the scale:.2f} 奈特。",
    ),
    "infer-unscaled": (
        "corrected",
        "若答案是单个键，则没有损害（损失增加 {loss added with no scale:.4f} 奈特）：权重更尖锐"
        "，选中的仍是同一个键。MiniLM 的嵌入则会改变。",
    ),
    "depth": (
        "reproduced",
        "训练开始时成立：不缩放时，传到第一层的梯度在 1、4、16 层（带残差连接）中是缩放时的 "
        "{gradient unscaled over scaled, with skip connections, layers=1:.1f}、"
        "{gradient unscaled over scaled, with skip connections, layers=4:.0f}、"
        "{gradient unscaled over scaled, with skip connections, layers=16:.0f} 倍，随深度爆炸。",
    ),
    "scale-cost": (
        "reproduced",
        "内核在取指数时顺便相乘，对同样的分数几乎没有开销：1024 个键时，时间之比为 "
        "{time with the scale over without, n=1024 d_k=64:.2f}。",
    ),
    "scale-pass": (
        "refuted",
        "单独遍历一次分数矩阵，是可以察觉的：100 个键时，总时间是不做除法时的 "
        "{time of eager attention with the division over without, n=100 d_k=64:.2f} 倍；这一步"
        "受内存带宽和调用本身的限制。",
    ),
    "no-scale-training": (
        "depends on the horizon",
        "只是慢：d_k = 64 时，要使损失降到随机猜测的十分之一，所需步数是缩放时的 "
        "{steps without the scale over steps with it, d_k=64:.0f} 倍。150 步之后损失为 "
        "{loss unscaled d_k=64, 150 steps:.2f}，1200 步之后降到 "
        "{loss unscaled d_k=64, 1200 steps:.2f}；缩放时 150 步之后已是 "
        "{loss scaled d_k=64, 150 steps:.4f}。",
    ),
    "no-scale-length": (
        "depends on the horizon",
        "序列长时学得更慢，训练足够久后则相同：n 由 8 增到 32，150、600、1200 步之后损失分别多出 "
        "{loss unscaled n=32 over n=8, 150 steps:.2f}、"
        "{loss unscaled n=32 over n=8, 600 steps:.2f}、"
        "{loss unscaled n=32 over n=8, 1200 steps:.2f} nat。",
    ),
    "dk-selectivity": (
        "refuted",
        "只在开始时过于平均。d_k = 64 时，训练 150 步之后，所求的键得到的权重是 "
        "{weight on the key asked for, divided by d_k, d_k=64:.2f}（除以 sqrt(d_k) 时是 "
        "{weight on the key asked for, divided by sqrt(d_k), d_k=64:.2f}），损失同样低："
        "{loss divided by d_k, d_k=64, 150 steps:.4f} 与 "
        "{loss divided by sqrt(d_k), d_k=64, 150 steps:.4f}。",
    ),
    "two-sqrt-harm": (
        "corrected",
        "对训练好的模型没有损害：d_k = 256 时，除以 sqrt(d_k)、2 sqrt(d_k)、4 sqrt(d_k)，150 步之"
        "后的损失为 {loss divided by sqrt(d_k), d_k=256, 150 steps:.4f}、"
        "{loss divided by 2 sqrt(d_k), d_k=256, 150 steps:.4f}、"
        "{loss divided by 4 sqrt(d_k), d_k=256, 150 steps:.4f}。",
    ),
    "footnote": (
        "reproduced",
        "引文逐字无误，确在第 4 页脚注。",
    ),
    "implicit-assumption": (
        "corrected",
        "论文在脚注 4 中明确写出了这一假设。",
    ),
    "table3-rowB": (
        "refuted",
        "表中没有未缩放的模型；缩放的模型在 d_k 变小时变差：d_k 由 64 降到 32 和 16，BLEU 由"
        " 25.8 降到 25.4 和 25.1。",
    ),
    "additive-attribution": (
        "refuted",
        "论文自己的实验既没有加性注意力，也没有不缩放的模型；这一比较引自 Britz 等人 2017 年的"
        "论文。",
    ),
    "additive-small-dk": (
        "reproduced",
        "d_k = 8 时相当（点积的损失多 {loss dot over additive d_k=8:.2f}），32 时加性注意力更好（"
        "多 {loss dot over additive d_k=32:.2f}）。",
    ),
    "additive-no-scale": (
        "reproduced",
        "成立。但 tanh 限制的不是分数：分数的界是 |w| 之和，训练后为 {sum of |w|:.1f}，分数达到"
        " {largest score:.1f}。",
    ),
    "tanh-range": (
        "reproduced",
        "成立：在 3 处导数只有 {derivative of tanh at 3:.3f}。但分数是这些数的加权和，本身没有"
        "固定的界。",
    ),
    "additive-time": (
        "corrected",
        "每个词只需投影一次，时间为 n^2 d + n d^2，n > d 时与点积同阶：测得 n^"
        "{additive, exponent in n:.2f} d^{additive, exponent in d:.2f}。",
    ),
    "dot-time": (
        "reproduced",
        "成立：测得 n^{dot, exponent in n:.2f} d^{dot, exponent in d:.2f}。",
    ),
    "additive-memory": (
        "corrected",
        "按公式逐步计算，要存下 n^2 d 个数：n = 256 时，内存随 d 增长的指数为 "
        "{additive in NumPy, exponent in d of the memory:.2f}。分块计算则不需要这样的数组。",
    ),
    "additive-speed": (
        "reproduced",
        "按框架代码的写法成立：在 CPU 单线程上，64 个键时相差 "
        "{time of additive over dot, eager code, n=64 d=64:.0f} 倍，256 个键时 "
        "{time of additive over dot, eager code, n=256 d=64:.0f} 倍。GPU 上随 n、d 和头数增大："
        "单头 256 个键为 {H200, one head, n=256 d=64:.1f} 倍，16 头 2048 个键为 "
        "{H200, 16 heads, n=2048 d=64:.0f} 倍（H200，引用而非此次测量）。",
    ),
    "additive-kernels": (
        "corrected",
        "两者都实现得好时，n = 1024 只相差 "
        "{time of additive over dot, kernels, n=1024 d=64:.1f} 倍。",
    ),
    "dot-faster": (
        "reproduced",
        "成立：256 个键时，按框架代码的写法快 "
        "{time of additive over dot, eager code, n=256 d=64:.0f} 倍，两者都用专门的内核则快 "
        "{time of additive over dot, kernels, n=256 d=64:.1f} 倍。",
    ),
    "tanh-parallel": (
        "corrected",
        "恰恰相反：各个 tanh 互不等待，并行度最高。d = 64 时，每个词对平均可同时进行 "
        "{operations at a time, additive, d=64:.0f} 个运算，点积为 "
        "{operations at a time, dot, d=64:.0f} 个。慢在内存：要读写 n^2 d 个数。",
    ),
    "memory": (
        "reproduced",
        "成立，只要保存整个权重矩阵：随 n 增长的指数为 "
        "{exponent in n of the formula's memory:.2f}。",
    ),
    "memory-needed": (
        "corrected",
        "不必：精确的分块注意力在 n = 4096 时连输出在内只占该矩阵的 "
        "{extra memory over 4 n^2 bytes, sdpa, n=4096:.1%}。",
    ),
    "attention-rows": (
        "reproduced",
        "三条都成立；但 exp 下溢后权重不再严格递增：d_k = 1024 且不缩放时，"
        "{pairs with equal weights, unscaled d_k=1024 n=32:.0%} 的相邻分数权重相等，几乎全为 0。",
    ),
    "dv-differs": ("reproduced", "d_v 可以与 d_k 不同：宽度为 1、3、200 的输出都与矩阵乘积一致。"),
    "backward": ("reproduced", "两个公式都成立；有缩放因子时两者都乘以它。"),
    "weight-grad": (
        "corrected",
        "应为 X^T dL/dQ；笔记的公式只有在 d_k = d_model 时才有定义，而且相对误差为 "
        "{relative error of dL/dQ X^T:.2f}。",
    ),
    "swap": (
        "reproduced",
        "确实不同，相差 {relative difference, n=64 d_k=64:.0%}：按行归一化破坏了对称性。",
    ),
    "init-symmetric": (
        "reproduced",
        "统计等价；但每次抽取的矩阵远非对称：反对称部分占 {skew d_k=64:.2f}。",
    ),
    "instances-differ": (
        "reproduced",
        "确实不同，相差 {relative difference, random:.0%}：两者几乎正交。",
    ),
    "noncommute": (
        "corrected",
        "两者互为转置，当且仅当 W^Q W^K^T 对称时相等，与交换律无关：单位矩阵与旋转可交换，仍相"
        "差 {relative difference, commuting:.0%}。",
    ),
    "divergence": (
        "corrected",
        "取决于任务。查询与键的嵌入不同时，1200 步之后 W^Q - W^K 的范数增长 "
        "{growth of the difference, directed task, 1200 steps:.0%}，但 W^Q + W^K 也增长 "
        "{growth of the sum, directed task, 1200 steps:.0%}；嵌入相同时，前者反而变化 "
        "{growth of the difference, symmetric task, 1200 steps:.0%}，两者趋近。",
    ),
    "feedback": (
        "depends on the horizon",
        "学习最快的阶段确有自我增强，但和与差一样：前 60 步中，后一半的增长比前一半多出初始范数的 "
        "{acceleration of the difference, 60 steps:.2f}（和为 "
        "{acceleration of the sum, 60 steps:.2f}）；到 150 步，损失降到 {loss, 150 steps:.4f}，差"
        "的增长已慢下来（{acceleration of the difference, 150 steps:.2f}）。",
    ),
    "grads-differ": (
        "reproduced",
        "两者近似正交，距离为 {distance n=8:.2f}（n = 8）和 {distance n=64:.2f}（n = 64）；即使"
        " Q = K 也不相等，相距 {distance Q=K n=64:.2f}。",
    ),
    "grads-structure": (
        "corrected",
        "是同一个公式：交换 Q 与 K 并转置 dL/dS，一个就变成另一个（只差 "
        "{relative difference after exchange of Q and K:.0e}）。不对称的是 dL/dS 本身，因为只按"
        "行归一化。",
    ),
    "tied-kv": (
        "corrected",
        "只在宽度容不下两种角色时是瓶颈：宽度为 4 时，1200 步之后损失仍多出 "
        "{loss added by tying, width 4, 1200 steps:.2f} nat；宽度为 8 时只是慢，150 步之后多出 "
        "{loss added by tying, width 8, 150 steps:.2f}，1200 步之后只有 "
        "{loss added by tying, width 8, 1200 steps:.3f}；宽度为 32 时没有差别。",
    ),
    "tied-conflict": (
        "corrected",
        "两个梯度近似正交，谈不上冲突：1200 步内，余弦的平均值在宽度为 8 时是 "
        "{cosine of the two gradients, width 8, 1200 steps:.2f}，32 时是 "
        "{cosine of the two gradients, width 32, 1200 steps:.2f}。",
    ),
    "value-index": (
        "corrected",
        "应是照抄 W^K 一行的笔误：换一个 W^V，输出改变 "
        "{change of the output with another W^V:.0%}，权重丝毫不变；V 不参与匹配。",
    ),
    "cosine-no-scale": (
        "reproduced",
        "不会饱和。但余弦相似度反而需要放大，否则几乎没有选择性：d_k = 64 时，64 个键的最大权重"
        "只有 {largest weight, cosine d_k=64:.3f}。",
    ),
    "bilinear-no-scale": (
        "reproduced",
        "成立：矩阵元素的初始方差若为 1/d_k^2，缩放就已经在初始化里（d_k = 64 时最大权重为 "
        "{largest weight, bilinear of variance 1/d_k^2, unscaled d_k=64:.2f}）；若按常用的 "
        "1/d_k，则与点积一样饱和（{largest weight, bilinear unscaled d_k=64:.2f}）。",
    ),
    "relative-factor": (
        "reproduced",
        "有的如此：DeBERTa 除以 sqrt(3 d_k)，T5 不缩放；也有的仍除以 sqrt(d_k)，尽管方差为 1 的"
        "相对位置向量使分数的方差变为 {variance with relative vectors over without, d_k=64:.2f}"
        " 倍。",
    ),
    "batchnorm-form": (
        "corrected",
        "它除以的是由假设得出的常数，批归一化除以的是测得的标准差：分量的标准差为 2 时，方差是 "
        "{variance of scaled scores, components of std 2:.1f} 而不是 1。",
    ),
    "always-in-range": (
        "refuted",
        "只在开始时成立：常数跟不上学到的东西，d_k = 32 时方差由 "
        "{variance before training d_k=32:.1f} 增至 {variance after training d_k=32:.1f}。",
    ),
    "temperature": (
        "reproduced",
        "成立；每行的温度还取决于查询的模长，它与 sqrt(d_k) 之比在 d_k = 16 时波动 "
        "{spread of |q|/sqrt(d_k), d_k=16 n=10:.2f}，512 时波动 "
        "{spread of |q|/sqrt(d_k), d_k=512 n=64:.3f}。",
    ),
    "stop-learning": (
        "depends on the horizon",
        "会学，只是很慢：损失与随机猜测之比，150、600、1200 步之后分别为 "
        "{loss over ln 8, 150 steps:.2f}、{loss over ln 8, 600 steps:.2f}、"
        "{loss over ln 8, 1200 steps:.2f}；开始时不饱和的模型，150 步之后为 "
        "{loss unsaturated after 150 steps over ln 8:.4f}。",
    ),
    "unscaled-position": (
        "corrected",
        "集中在少数键上（32 个键中的 {keys that count, unscaled d_k=64 n=32:.1f} 个），但不偏向任"
        "何位置：首尾两个键合计 {weight on first and last key, unscaled d_k=64 n=32:.3f}，正是任"
        "意两个键的 2/32；位置偏好来自输入或训练。",
    ),
    "dk-independence": (
        "refuted",
        "宽度低于任务所需时不成立：1200 步之后，d_k = 1 和 2 的损失为 {loss d_k=1, 1200 steps:.2f}"
        " 和 {loss d_k=2, 1200 steps:.2f} nat；从 d_k = 4 起只是快慢之别（"
        "{loss d_k=4, 1200 steps:.4f}）。",
    ),
    "glorot-unit-var": (
        "corrected",
        "只有 d_k = d_model 时成立：d_model = 512 时，q 的分量方差在 d_k = 16 时为 "
        "{variance of a component of q, Glorot, d_k=16:.2f}，64 时为 "
        "{variance of a component of q, Glorot, d_k=64:.2f}。",
    ),
    "init-controls-variance": (
        "reproduced",
        "控制的是 q 与 k 的方差（d_model = 2048 时，Xavier 为 "
        "{variance of q, Glorot, d_model=2048:.2f}，Kaiming 为 "
        "{variance of q, Kaiming, d_model=2048:.2f}），不是它们点积的方差。",
    ),
    "sigma-law": (
        "corrected",
        "应为 dim sigma^4：q 与 k 各带来一个 sigma^2；sigma^2 = 4 时，方差是 dim sigma^2 的 "
        "{variance over dim sigma^2, sigma^2=4:.2f} 倍，只有 sigma = 1 时两者一致。",
    ),
    "products-grow": (
        "reproduced",
        "绝对值增大，指数为 {exponent of |q k| in d_k:.2f}，均值仍为 0。相对于模长则缩小，指数"
        "为 {exponent of |cosine| in d_k:.2f}：随机方向趋于正交，这才是“维度灾难”。",
    ),
    "cosine-analogy": (
        "corrected",
        "两个模长之积约为 d_k，而不是 sqrt(d_k)：d_k = 64 时，随机向量余弦的标准差只有 "
        "{std of cosines d_k=64:.3f}，缩放后的分数则为 1。",
    ),
    "fold-start": (
        "reproduced",
        "开始时成立：输出只差 {relative difference at the start:.0e}。",
    ),
    "fold-step": (
        "corrected",
        "学习率不变时不成立：d_k = 32 时，一步梯度下降使分数的变化变为 "
        "{step of the scores folded over in the kernel, descent:.2f} 倍，即 sqrt(d_k) 倍；一步 "
        "Adam 为 {step of the scores folded over in the kernel, signs:.2f} 倍，即 d_k^(1/4) 倍"
        "。",
    ),
    "expressiveness": (
        "corrected",
        "表达能力相同：不缩放而用 W^Q/sqrt(d_k)，得到的是同一个函数（只差 "
        "{relative difference, d_k=32:.0e}）。改变的只是训练的起点和 W^Q 移动的快慢。",
    ),
    "dot-no-params": (
        "reproduced",
        "点积本身不加参数，加性注意力多 2dh + h 个；从一层的输入算起则几乎相同，只多出 v_a 的 "
        "{parameters of additive attention beyond W^Q and W^K, d=64 h=64:.0f} 个。",
    ),
    "universal": (
        "reproduced",
        "transformers 库里 {models with attention:.0f} 个含注意力的模型目录中，"
        "{share of models with 1/sqrt of a width:.1%} 如此。",
    ),
    "layer-norm": (
        "corrected",
        "作用不同：它使输入的方差为 1，但 d_k = 64 时 q·k 的方差仍为 "
        "{variance unscaled d_k=64, inputs normalised:.0f}。",
    ),
    "saturated-gradient": (
        "refuted",
        "梯度仍然回传：传到 Q、K、V 的梯度，范数是未饱和时的 "
        "{gradient to query over unsaturated:.1f}、{gradient to key over unsaturated:.1f}、"
        "{gradient to value over unsaturated:.1f} 倍。",
    ),
    "first-step": (
        "corrected",
        "取决于优化器。除以 sqrt(d_k) 时，一步之后分数的变化是 d_k 的幂，指数在 SGD 和 Muon 下为 "
        "{exponent, SGD, divided by sqrt(d_k):.2f} 和 {exponent, Muon, divided by sqrt(d_k):.3f}，"
        "在 Adam 下为 {exponent, Adam, divided by sqrt(d_k):.2f}；Adam 要除以 d_k 才与 d_k 无关（"
        "{exponent, Adam, divided by d_k:.2f}）。",
    ),
    "unstable-training": (
        "depends on the horizon",
        "训练足够久后成立（就学习率的敏感度而言）：600 步之后，学习率取得不好，损失平均多出 "
        "{sensitivity, unscaled, 600 steps:.2f} nat，缩放时为 "
        "{sensitivity, scaled, 600 steps:.2f}；150 步时尚看不出，因为不缩放时还没有哪个学习率学到"
        "多少（最好的损失为 {loss at the best rate, unscaled, 150 steps:.2f}）。",
    ),
    "qk-norm": (
        "reproduced",
        "不仅能替代缩放，对学习率还更不敏感：600 步之后，学习率取得不好，损失平均多出 "
        "{sensitivity, QK-norm, 600 steps:.2f} nat，缩放时为 "
        "{sensitivity, scaled, 600 steps:.2f}。",
    ),
    "softcap": (
        "undecided",
        "150 步时抽样太少，尚不能判定；600 步起成立：学习率取得不好，"
        "600 步之后的损失平均多出 "
        "{sensitivity, softcap, 600 steps:.2f} nat，只除以 sqrt(d_k) 时为 "
        "{sensitivity, scaled, 600 steps:.2f}。",
    ),
    "qk-clip": (
        "undecided",
        "150 步时抽样太少，尚不能判定；600 步起成立：学习率取得不好，"
        "600 步之后的损失平均多出 "
        "{sensitivity, QK-clip, 600 steps:.2f} nat，只除以 sqrt(d_k) 时为 "
        "{sensitivity, scaled, 600 steps:.2f}。",
    ),
    "trained-power": (
        "refuted",
        "由除数决定：任务需要多大的缩放后分数，q·k 就变到多大。训练前它随 d_k 增长的指数为 "
        "{exponent of std(q k), divided by sqrt(d_k), 0 steps:.2f}，600 步之后，除以 sqrt(d_k) 时为"
        " {exponent of std(q k), divided by sqrt(d_k), 600 steps:.2f}，除以 d_k 时为 "
        "{exponent of std(q k), divided by d_k, 600 steps:.2f}。",
    ),
    "longer-log-n": (
        "depends on the horizon",
        "对只找一个键的头，开始时成立；训练越久，它受得住的系数越大。在训练长度的 16 倍处，训练"
        " 2000 步时损失为 {loss ln n, 16 times the length, 2000 steps:.2f} nat，最好的常数为 "
        "{loss best, 16 times the length, 2000 steps:.2f}；5000 步时为 "
        "{loss ln n, 16 times the length, 5000 steps:.2f} 与 "
        "{loss best, 16 times the length, 5000 steps:.2f}。",
    ),
    "longer-solved": (
        "refuted",
        "长度造成的损失，有一部分任何系数都补不回来：键越多，其余分数的最大值越高。训练 2000 步，"
        "在训练长度上损失为 {loss at the trained length, 2000 steps:.2f} nat，在 16 倍处，不乘系数"
        "为 {loss as trained, 16 times the length, 2000 steps:.2f}，乘 ln n / ln n_0 为 "
        "{loss ln n, 16 times the length, 2000 steps:.2f}。",
    ),
    "symmetric-share": (
        "reproduced",
        "初始化时如此：{symmetric share at random, d_model=384 d_k=32:.3f} 与 "
        "{symmetric share at random, d_model=576 d_k=64:.3f}（两个预训练模型的宽度）。训练之后则"
        "不然：两个模型平均都高于一半。",
    ),
}
"""By id: the verdict, and what is right if it is that; {FIGURE:FORMAT} stands for a value."""


def finding(name: str, verdict: str, figures: Iterable[Figure]) -> str:
    """What is right, with its figures; nothing if the verdict is not that of the sentence.

    Examples
    --------
    >>> from sdpa_lab.claims.chinese import finding
    >>> from sdpa_lab.claims.record import Figure
    >>> finding("swap", "reproduced", [Figure("relative difference, n=64 d_k=64", 1.1, 1, 2, 9)])
    '确实不同，相差 110%：按行归一化破坏了对称性。'
    >>> finding("swap", "undecided", [])
    ''
    """
    expected, sentence = FINDINGS[name]
    values = {figure.name: figure.value for figure in figures}
    return sentence.format_map(values) if expected == verdict else ""


def bilingual(rows: Iterable[Row]) -> str:
    """The rows as they print themselves, each with its verdict and finding in Chinese.

    Examples
    --------
    >>> from sdpa_lab.claims import ledger
    >>> from sdpa_lab.claims.chinese import bilingual
    >>> print(bilingual(ledger(["softmax-raw"])).splitlines()[-1])
      结论     复现：在所印位数内成立：最大的权重只比 1 小 8.3e-07。
    """
    texts = []
    for row in rows:
        sentence = finding(row.claim.id, row.verdict, row.figures)
        end = f"：{sentence}" if sentence else "。"
        texts.append(f"{row}\n  结论     {VERDICTS[row.verdict]}{end}")
    return "\n\n".join(texts)
