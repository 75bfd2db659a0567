// Attention and its gradients for matrices stored row by row in Float64Array, as plain loops.
// Names are those of sdpa.reference: q, k (n, d), v, g (n, dv), s and p (n, n).
"use strict";

const Attention = (() => {
  // Numbers that look random, the same for the same seed: a 32-bit counter, mixed ("lowbias32").
  function uniform(seed) {
    let counter = Math.imul(seed + 1, 0x9e3779b9);
    return () => {
      counter = (counter + 0x6d2b79f5) | 0;
      let x = counter;
      x = Math.imul(x ^ (x >>> 16), 0x21f0aaad);
      x = Math.imul(x ^ (x >>> 15), 0x735a2d97);
      return (((x ^ (x >>> 15)) >>> 0) + 0.5) / 4294967296;
    };
  }

  // Independent N(0, 1) numbers, two from each pair of uniform ones (Box and Muller).
  function normal(random, size) {
    const result = new Float64Array(size);
    for (let i = 0; i < size; i += 2) {
      const radius = Math.sqrt(-2 * Math.log(random()));
      const angle = 2 * Math.PI * random();
      result[i] = radius * Math.cos(angle);
      if (i + 1 < size) result[i + 1] = radius * Math.sin(angle);
    }
    return result;
  }

  // a (m, l) times b (l, n); b is transposed, (n, l), where `transposed`.
  function product(a, b, m, l, n, transposed) {
    const result = new Float64Array(m * n);
    const [alongSum, alongRow] = transposed ? [1, l] : [n, 1];
    for (let i = 0; i < m; i++) {
      for (let j = 0; j < n; j++) {
        let sum = 0;
        for (let t = 0; t < l; t++) sum += a[i * l + t] * b[t * alongSum + j * alongRow];
        result[i * n + j] = sum;
      }
    }
    return result;
  }

  function transpose(a, m, n) {
    const result = new Float64Array(m * n);
    for (let i = 0; i < m; i++) for (let j = 0; j < n; j++) result[j * m + i] = a[i * n + j];
    return result;
  }

  function softmaxRows(s, n) {
    const p = new Float64Array(s.length);
    for (let start = 0; start < s.length; start += n) {
      let largest = -Infinity;
      let sum = 0;
      for (let j = start; j < start + n; j++) largest = Math.max(largest, s[j]);
      for (let j = start; j < start + n; j++) sum += p[j] = Math.exp(s[j] - largest);
      for (let j = start; j < start + n; j++) p[j] /= sum;
    }
    return p;
  }

  // Gradients of sum(g * p v) to s, q, k and v.
  function gradients({ q, k, v, g }, p, n, d, dv, scale) {
    const ds = product(g, v, n, dv, n, true);
    for (let start = 0; start < ds.length; start += n) {
      let mean = 0;
      for (let j = start; j < start + n; j++) mean += p[j] * ds[j];
      for (let j = start; j < start + n; j++) ds[j] = p[j] * (ds[j] - mean);
    }
    const dq = product(ds, k, n, n, d, false).map((x) => scale * x);
    const dk = product(transpose(ds, n, n), q, n, n, d, false).map((x) => scale * x);
    return { ds, dq, dk, dv: product(transpose(p, n, n), g, n, n, dv, false) };
  }

  // Scores, weights, output and the gradients.
  function attention(operands, n, d, dv, scale) {
    const { q, k, v } = operands;
    const s = product(q, k, n, d, n, true).map((x) => scale * x);
    const p = softmaxRows(s, n);
    const out = product(p, v, n, n, dv, false);
    return { s, p, out, ...gradients(operands, p, n, d, dv, scale) };
  }

  // Per row of p: entropy, largest weight, Frobenius norm of the Jacobian diag(p) - p p^T.
  function rowStatistics(p, n) {
    const rows = { entropy: [], largest: [], jacobian: [] };
    for (let start = 0; start < p.length; start += n) {
      let [entropy, largest, p2, p3] = [0, 0, 0, 0];
      for (const x of p.subarray(start, start + n)) {
        if (x > 0) entropy -= x * Math.log(x);
        largest = Math.max(largest, x);
        p2 += x * x;
        p3 += x * x * x;
      }
      rows.entropy.push(entropy);
      rows.largest.push(largest);
      rows.jacobian.push(Math.sqrt(Math.max(0, p2 - 2 * p3 + p2 * p2)));
    }
    return rows;
  }

  // Mean square of a, and the mean over rows of the variance within the row (of n numbers).
  function variances(a, n) {
    let [total, within] = [0, 0];
    for (let start = 0; start < a.length; start += n) {
      const row = a.subarray(start, start + n);
      const mean = row.reduce((sum, x) => sum + x, 0) / n;
      for (const x of row) {
        total += (x * x) / a.length;
        within += (x - mean) ** 2 / (n - 1) / (a.length / n);
      }
    }
    return { total, within };
  }

  // Euclidean norms of the rows of a, which are d long: root of the mean square, median, all.
  function rowNorms(a, d) {
    const norms = [];
    for (let start = 0; start < a.length; start += d) {
      norms.push(Math.sqrt(a.subarray(start, start + d).reduce((sum, x) => sum + x * x, 0)));
    }
    const sorted = [...norms].sort((x, y) => x - y);
    const middle = sorted.length >> 1;
    const median = sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
    return { norms, rms: Math.sqrt(norms.reduce((t, x) => t + x * x, 0) / norms.length), median };
  }

  return { uniform, normal, product, attention, gradients, rowStatistics, variances, rowNorms };
})();
