// A chart's data, and searches in it. Times are in the chart's unit; ops are indices into the arrays.

const REROUTED = 1, CUT = 2, REDONE = 4, LOST = 8;
const EMPTY = -1;

async function unpack(meta) {
  const text = document.getElementById(meta.data).textContent;
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = await new Response(stream).arrayBuffer();
  const n = meta.ops, rows = meta.pipelines * meta.stages;
  let at = 0;
  const take = (Type, length) => {
    const part = new Type(bytes, at, length);
    at += part.byteLength;
    return part;
  };
  const first = take(Uint32Array, rows + 1), microbatch = take(Int32Array, n);
  const start = take(Float32Array, n), end = take(Float32Array, n);
  const kind = take(Uint8Array, n), marks = take(Uint8Array, n);
  const deadFrom = new Float64Array(rows).fill(Infinity);
  for (const [row, since] of meta.dead) deadFrom[row] = since;
  const interest = new Uint8Array(rows);  // if several rows share a pixel, the row with the highest value is drawn
  for (let r = 0; r < rows; r++) {
    let all = 0;
    for (let i = first[r]; i < first[r + 1]; i++) all |= marks[i];
    interest[r] = deadFrom[r] < Infinity ? 3 : all & ~REROUTED ? 2 : all ? 1 : 0;
  }
  const places = new Float64Array(rows).fill(HIDDEN);
  let placed = 0;
  for (const group of meta.groups ?? []) {
    for (const r of group) places[r] = placed++;
    placed += 0.4;
  }
  placed -= 0.4;
  return { meta, rows, n, first, microbatch, start, end, kind, marks, deadFrom, interest, places, placed };
}

// The first op of a row that ends after t.
function firstAfter(chart, row, t) {
  let a = chart.first[row], b = chart.first[row + 1];
  while (a < b) {
    const m = (a + b) >> 1;
    if (chart.end[m] <= t) a = m + 1; else b = m;
  }
  return a;
}

function opAt(chart, row, t) {
  const i = firstAfter(chart, row, t);
  return i < chart.first[row + 1] && chart.start[i] <= t ? i : EMPTY;
}

function rowOf(chart, op) {
  let a = 0, b = chart.rows;
  while (a < b) {
    const m = (a + b) >> 1;
    if (chart.first[m + 1] <= op) a = m + 1; else b = m;
  }
  return a;
}

// All ops of a micro-batch in the order of time, and the tensors between them as [producer, consumer].
function routeOf(chart, microbatch) {
  const ops = [];
  for (let i = 0; i < chart.n; i++) if (chart.microbatch[i] === microbatch) ops.push(i);
  const row = new Map(ops.map((i) => [i, rowOf(chart, i)]));
  const P = chart.meta.stages, stage = (i) => row.get(i) % P;
  ops.sort((a, b) => chart.start[a] - chart.start[b] || chart.end[a] - chart.end[b] || stage(a) - stage(b));
  const links = [], slack = chart.meta.span * 1e-6;
  for (const i of ops) {
    const step = STEPS[chart.kind[i]];
    if (!step) continue;
    const from = stage(i) - step;
    let best = EMPTY;
    for (const j of ops) {
      if (STEPS[chart.kind[j]] === step && stage(j) === from && !(chart.marks[j] & CUT) && chart.end[j] <= chart.start[i] + slack) best = j;
    }
    if (best !== EMPTY) links.push([best, i]);
  }
  return { microbatch, ops, links, row };
}

function homeOf(chart, microbatch) {
  let d = 0, g = microbatch;
  while (g >= chart.meta.counts[d]) g -= chart.meta.counts[d++];
  return [d, g];
}

const workerName = (chart, row) => `W(${Math.floor(row / chart.meta.stages)},${row % chart.meta.stages})`;
const number = (x) => String(Number(x.toPrecision(6)));

function describe(chart, op) {
  const k = KINDS[chart.kind[op]], row = rowOf(chart, op), P = chart.meta.stages, g = chart.microbatch[op], marks = chart.marks[op];
  const lines = [`${row % P}${k}${g < 0 ? "" : g}  ${job.names[k]}`];
  if (g >= 0) {
    const [d, i] = homeOf(chart, g);
    lines.push(`micro-batch ${g} (pipeline ${d}, index ${i}), stage ${row % P}`);
    lines.push(`on ${workerName(chart, row)}` + (marks & REROUTED ? `, re-routed from W(${d},${row % P})` : ""));
  } else lines.push(`on ${workerName(chart, row)}`);
  const t0 = chart.start[op], t1 = chart.end[op];
  lines.push(`${number(t0)} to ${number(t1)} ${chart.meta.unit}, ${number(t1 - t0)} long`);
  if (marks & CUT) lines.push("cut off by the death");
  if (marks & LOST) lines.push("done, but lost with its worker");
  if (marks & REDONE) lines.push("redone");
  return lines.join("\n");
}
