// The far view: rows of pixels, drawn off screen and stretched to the height of a row.

let sheet = null, sheetInk = null, image = null, out = null, sums = null;

function pixels(ctx, chart, pane, view, ink, { Y }, rows, route) {
  const ratio = view.ratio, w = Math.max(1, Math.round(pane.w * ratio));
  const lines = view.row * ratio >= 1 ? rows.map((r) => [r, Y(r), view.row]) : crowded(chart, pane, view, rows, Y);
  if (!sheet || sheet.width !== w || sheet.height < lines.length) {
    sheet = new OffscreenCanvas(w, Math.max(lines.length, 64));
    sheetInk = sheet.getContext("2d");
    image = sheetInk.createImageData(w, sheet.height);
    out = new Uint32Array(image.data.buffer);
    sums = new Float32Array(w * 4);
  }
  const hatch = word(rgb(ink.hatch)), kx = w / (view.t1 - view.t0), looks = Float32Array.from([...ink.looks, ...ink.dim].flat());
  lines.forEach(([row], n) => {
    cover(chart, row, view, kx, w, sums, looks, route);
    const dead = (chart.deadFrom[row] - view.t0) * kx, base = n * w;
    for (let x = 0, s = 0; x < w; x++, s += 4) {
      const a = sums[s + 3];
      if (a > 0.004) {
        out[base + x] = (Math.min(255, a * 255) << 24) | ((sums[s + 2] / a) << 16) | ((sums[s + 1] / a) << 8) | (sums[s] / a);
      } else out[base + x] = x >= dead && (x + n * 2) % 8 < 3 ? hatch : 0;
    }
    sums.fill(0);
  });
  sheetInk.putImageData(image, 0, 0, 0, 0, w, lines.length);
  ctx.imageSmoothingEnabled = false;
  if (view.row * ratio < 1) ctx.drawImage(sheet, 0, 0, w, lines.length, pane.x, pane.y, pane.w, lines.length / ratio);
  else for (let n = 0; n < lines.length; n++) ctx.drawImage(sheet, 0, n, w, 1, pane.x, lines[n][1], pane.w, Math.max(lines[n][2] - (view.row > 3 ? 1 : 0), 1 / ratio));
}

// The row to draw in each line of pixels. If several rows share the line, this is the most interesting row (a death,
// redone or re-routed ops).
function crowded(chart, pane, view, rows, Y) {
  const best = new Map();
  for (const r of rows) {
    const line = Math.floor((Y(r) - pane.y) * view.ratio), had = best.get(line);
    if (line >= 0 && line < pane.h * view.ratio && (had === undefined || chart.interest[r] > chart.interest[had])) best.set(line, r);
  }
  const lines = [], last = Math.max(-1, ...best.keys());
  for (let n = 0, r = rows[0]; n <= last; n++) {
    r = best.get(n) ?? r;
    lines.push([r]);
  }
  return lines;
}

// Adds the colours of a row's ops, weighted by the share of each pixel that they cover. sums: r, g, b, share.
// looks: 3 numbers (r, g, b) for every kind and look. The second half is for ops that are not on the selected route.
function cover(chart, row, view, kx, w, sums, looks, route) {
  const { start, end, kind, marks, microbatch, first } = chart, stop = first[row + 1], { t0, t1 } = view;
  const chosen = route ? route.microbatch : EMPTY, faint = looks.length / 2;
  for (let i = firstAfter(chart, row, t0); i < stop && start[i] < t1; i++) {
    let c = 3 * kind[i];
    if (marks[i]) c += 15 * lookOf(marks[i]);
    if (chosen !== EMPTY && microbatch[i] !== chosen) c += faint;
    const r = looks[c], g = looks[c + 1], b = looks[c + 2], a = (start[i] - t0) * kx, z = (end[i] - t0) * kx;
    const last = z < w ? z : w;
    for (let x = a > 0 ? Math.floor(a) : 0; x < last; x++) {
      const share = (z < x + 1 ? z : x + 1) - (a > x ? a : x), s = x * 4;
      sums[s] += r * share;
      sums[s + 1] += g * share;
      sums[s + 2] += b * share;
      sums[s + 3] += share;
    }
  }
}

const word = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
