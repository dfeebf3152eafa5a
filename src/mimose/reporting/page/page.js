"use strict";

// The parts of the page: what plot.js defines, applied to the data of a run
(() => {
  const run = JSON.parse(document.getElementById("run").textContent);

  const CHOICES = { K: "kept", H: "saved on the host", r: "recomputed", h: "recomputed, input on the host", f: "cannot be recomputed" };
  const TONES = { K: "keep", H: "on-host", r: "again", h: "from-host", f: "grey" };
  const recomputed = (plan) => count(plan, "r") + count(plan, "h");

  let chosen = Math.max(0, run.sizes.length - 1);
  const limit = run.budget_bytes - run.reserve_bytes;

  function drawAbout() {
    const head = run.header;
    byId("about").textContent = `${counted(run.runs.length, "block")} on ${head.device_name === "CPU" ? "the CPU" : head.device_name}` +
      ` · budget ${bytes(run.budget_bytes)}${head.enforce ? ", enforced" : ""} · ${head.planner} planner`;
    byId("foot").textContent = `mimose ${head.mimose_version} · torch ${head.torch_version} · started ${head.began.replace("T", " ")}` +
      ` · parameters ${bytes(head.parameter_bytes)}`;
  }

  function drawSummary() {
    const planned = run.total_steps - run.observed_steps;
    const tiles = [
      tile(bytes(run.peak_bytes), `highest peak, ${percent(run.peak_bytes / run.budget_bytes)} of ${bytes(run.budget_bytes)}`,
        run.peak_bytes / run.budget_bytes),
      tile(String(run.total_steps), `${run.total_steps === 1 ? "step" : "steps"} in ${seconds(run.seconds)}: ${run.observed_steps} observed, ${planned} planned`),
    ];
    if (run.worst_shortfall !== null) {
      tiles.push(tile(percent(run.worst_shortfall, 2), `largest underestimate of a peak; peaks are overestimated by ${percent(run.mean_excess, 2)} on average`));
    }
    if (run.evictions || run.recoveries) {
      const rerun = run.recoveries - run.retries;
      tiles.push(tile(String(run.evictions), `kept block ${run.evictions === 1 ? "run" : "runs"} evicted because memory ran short; recomputed instead of kept: ${rerun}; steps retried: ${run.retries}`));
    }
    if (run.time) {
      const time = run.time, saved = time.everything_seconds - time.chosen_seconds;
      tiles.push(saved < 0 // with the host: to wait for it can take longer than to recompute
        ? tile(seconds(time.chosen_seconds), `of recomputing and waiting for the host; to recompute everything would take ${seconds(time.everything_seconds)}`)
        : tile(seconds(saved), `of recomputing avoided: ${percent(saved / (time.everything_seconds || 1))} of the time to recompute everything`));
    }
    byId("summary").replaceChildren(...tiles);
  }
  function tile(value, text, share) {
    const parts = [make("b", {}, value)];
    if (share !== undefined) {
      const bar = make("i");
      bar.style.width = Math.min(100, 100 * share) + "%";
      parts.push(make("div", { class: share > 1 ? "meter over" : "meter" }, bar));
    }
    return make("div", { class: "tile" }, ...parts, make("span", {}, text));
  }

  function overBudget() {
    const planned = run.total_steps - run.observed_steps;
    if (run.steps_over) {
      const highest = run.planned_peak_bytes, which = run.steps_over > 1 ? "the highest of them " : "";
      return `${run.steps_over} of ${counted(planned, "planned step")} went over the budget, ${which}by ${bytes(highest - run.budget_bytes)}, to ${bytes(highest)}.` +
        (run.peak_bytes > highest ? ` An observed step went higher, to ${bytes(run.peak_bytes)}.` : "");
    }
    if (run.peak_bytes > run.budget_bytes) return `An observed step went over the budget, by ${bytes(run.peak_bytes - run.budget_bytes)}.`;
    if (run.peak_held_bytes > run.budget_bytes) {
      return `Peaks stayed under the budget, but the allocator held ${bytes(run.peak_held_bytes)}, which is over it.`;
    }
    return planned ? "No planned step was measured over the budget." : "No step was planned yet.";
  }

  function drawSteps() {
    byId("steps-text").textContent = `Each dot is the peak of a step. ${overBudget()} Observed steps, in which costs are measured, recompute more than planned ones.`;
    const s = run.steps, peaks = s.peak.map((peak, i) => peak ?? s.predicted[i]);
    const top = Math.max(run.budget_bytes, ...peaks.filter((v) => v !== null)) * 1.07;
    const plot = new Plot("steps-chart", {
      x: [s.number[0] ?? 0, s.number[s.number.length - 1] ?? 1], y: [0, top], xLabel: "step",
      xTick: (at) => (Number.isInteger(at) ? String(at) : ""),
      label: "Peak memory of every step, with the budget",
    });
    const at = (wanted, of) => s.number.flatMap((n, i) => (wanted(i) && of[i] !== null ? [[n, of[i]]] : []));
    plot.level(run.budget_bytes, "budget", "budget");
    plot.level(limit, "limit");
    const marked = run.events.filter((event) => !["planning", "eviction"].includes(event.kind)).map((event) => event.step);
    const evicting = s.number.filter((_, i) => s.evictions[i]);
    const triangle = (n, tone, kind) => plot.add("path", { d: `M${plot.x(n)} ${plot.box.top}l5 8h-10z`, class: kind, style: `fill:${colour(tone)}` });
    evicting.forEach((n) => triangle(n, "again", "eviction"));
    marked.forEach((n) => triangle(n, "budget", "event"));
    const size = s.number.length > 600 ? 3 : s.number.length > 150 ? 4 : 6;
    const hidden = s.peak.some((peak, i) => peak === null && s.held[i] !== null);
    if (hidden) plot.line(at((i) => s.held[i] !== null, s.held), "grey", "stroke-width:1.2");
    const bases = at((i) => s.plan[i] !== null, s.base);
    plot.dots(bases, "grey", 2);
    plot.dashes(at((i) => s.plan[i] !== null, s.predicted), "ink");
    plot.dots(at((i) => s.plan[i] === null, s.peak), "grey", size);
    plot.dots(at((i) => s.plan[i] !== null, s.peak), "plan", size, "peaks");
    plot.onHover((value, event) => {
      const i = nearest(s.number, value);
      if (i < 0) return undefined;
      showTip(event, [
        `step ${s.number[i]} · ${s.label[i]}`,
        s.plan[i] === null ? "observed: its costs were measured" : `plan ${s.plan[i]}: ${recomputed(s.plan[i])} recomputed` + (count(s.plan[i], "H") ? `, ${count(s.plan[i], "H")} on the host` : ""),
        s.evictions[i] > 0 && `${counted(s.evictions[i], "kept run")} evicted`,
        s.predicted[i] !== null && `predicted ${bytes(s.predicted[i])}`,
        s.peak[i] !== null ? `real peak ${bytes(s.peak[i])}` : "real peak not measured (below an earlier one)",
        `in use at the start ${bytes(s.base[i])}`,
      ]);
      return s.number[i];
    });
    legend("steps-legend", [["real peak, planned", "plan", "dot"], ["real peak, observed", "grey", "dot"], ["predicted", "ink"],
      ...(hidden ? [["held by the allocator", "grey"]] : []),
      ["budget", "budget", "dashed"], ["budget less reserve", "budget", "dotted"],
      ...(bases.length ? [["in use at the start of the step", "grey", "dot small"]] : []),
      ...(marked.length ? [["event, listed below", "budget", "triangle"]] : []),
      ...(evicting.length ? [["kept runs evicted", "again", "triangle"]] : [])]);
    byId("steps-note").textContent = s.number.length < run.total_steps
      ? `${s.number.length} of ${counted(run.total_steps, "step")} are shown: the one with the highest peak in each interval.` : "";
  }

  function drawSizes() {
    const s = run.steps, sizes = run.sizes;
    const xs = [...sizes.map((z) => z.x), ...s.x.filter((x) => x !== null)];
    const top = Math.max(run.budget_bytes * 1.1, ...sizes.map((z) => z.kept_peak_bytes));
    const plot = new Plot("sizes-chart", {
      x: [Math.min(...xs), Math.max(...xs)], y: [0, top * 1.03], xLabel: run.x_label, height: 320,
      xTick: (at) => (sizes.length > 1 && Number.isInteger(at) ? String(at) : ""),
      label: "Peak memory against input size, predicted and real",
    });
    plot.level(run.budget_bytes, "budget", "budget", true); // lines rise to the right and would cross it there
    const predicted = sizes.filter((z) => !z.at_most_as), alone = predicted.length === 1;
    const lines = run.one_way && !alone; // if several dimensions vary, a line would mislead
    const draw = (key, tone) => {
      const points = predicted.map((z) => [z.x, z[key]]);
      if (lines) plot.line(points, tone);
      else plot.dots(points, tone, !alone ? 4 : tone === "plan" ? 6 : 11); // of a plan that is an extreme, both show
    };
    draw("kept_peak_bytes", "keep");
    draw("recomputed_peak_bytes", "again");
    draw("plan_peak_bytes", "plan");
    plot.dots(s.x.flatMap((x, i) => (x !== null && s.peak[i] !== null && s.plan[i] !== null ? [[x, s.peak[i]]] : [])), "plan", 6);
    plot.level(0, "grid");
    if (sizes[chosen]) {
      plot.add("circle", { class: "chosen", cx: plot.x(sizes[chosen].x), cy: plot.y(sizes[chosen].plan_peak_bytes), r: 7 });
    }
    plot.onHover((value, event) => {
      const i = nearest(sizes.map((z) => z.x), value);
      if (i < 0) return undefined;
      const z = sizes[i];
      showTip(event, [`${z.label} · ${counted(z.steps, "step")}`, bound(z), `all kept ${bytes(z.kept_peak_bytes)}`,
        `this plan ${bytes(z.plan_peak_bytes)}`, `all recomputed ${bytes(z.recomputed_peak_bytes)}`]);
      return z.x;
    }, hideTip, (value) => choose(nearest(sizes.map((z) => z.x), value)));
    const kind = lines ? "" : "dot";
    legend("sizes-legend", [["all kept", "keep", kind], ["mimose's plan", "plan", kind], ["all recomputed", "again", kind], ["real peaks", "plan", "dot"]]);
  }

  function drawMap() {
    const sizes = run.sizes, names = run.runs, place = byId("map-chart");
    const width = Math.max(320, place.clientWidth), height = 320, bottom = 280, top = 12;
    const longest = Math.max(...names.map((n) => n.length));
    const left = Math.min(190, 14 + 7 * Math.min(longest, 25));
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Blocks kept and recomputed, by input size" });
    const cellX = (width - 12 - left) / sizes.length, cellY = (bottom - top) / names.length;
    const gap = Math.min(1.5, cellX / 6, cellY / 6);
    sizes.forEach((z, i) => [...z.plan].forEach((letter, k) => {
      root.append(svg("rect", {
        x: left + i * cellX, y: top + k * cellY, width: cellX - gap, height: cellY - gap, rx: Math.min(2, cellX / 5),
        style: `fill:${colour(TONES[letter])};opacity:${letter === "K" ? 0.85 : 1}`, class: "cell",
      }));
    }));
    const every = Math.ceil(names.length / 20);
    names.forEach((name, k) => {
      if (k % every) return;
      const short = name.length > 25 ? "…" + name.slice(-24) : name;
      root.append(svg("text", { x: left - 8, y: top + (k + 0.5) * cellY + 4, "text-anchor": "end", class: "name" }, short));
    });
    const some = Math.max(1, Math.ceil(sizes.length / Math.max(2, (width - left) / 64)));
    sizes.forEach((z, i) => {
      if (i % some) return;
      root.append(svg("text", { x: left + (i + 0.5) * cellX, y: bottom + 16, "text-anchor": "middle" }, sizes.length > 1 ? String(z.x) : z.label));
    });
    root.append(svg("text", { x: width - 12, y: height - 5, "text-anchor": "end" }, run.x_label));
    if (sizes[chosen]) {
      root.append(svg("rect", { class: "chosen", x: left + chosen * cellX - 1, y: top - 2, width: cellX + 1, height: bottom - top + 3, rx: 3 }));
    }
    const cell = (event) => {
      const area = root.getBoundingClientRect(), scale = width / area.width;
      const i = Math.floor(((event.clientX - area.left) * scale - left) / cellX);
      const k = Math.floor(((event.clientY - area.top) * scale - top) / cellY);
      return sizes[i] && names[k] !== undefined && sizes[i].plan[k] ? [i, k] : null;
    };
    root.addEventListener("pointermove", (event) => {
      const found = cell(event);
      if (!found) return hideTip();
      const [i, k] = found, z = sizes[i];
      showTip(event, [names[k], `${z.label}: ${CHOICES[z.plan[k]]}`,
        `keeping it costs ${bytes(z.saved_bytes[k])}`, `recomputing it takes ${seconds(z.run_seconds[k])}`]);
    });
    root.addEventListener("pointerleave", hideTip);
    root.addEventListener("click", (event) => { const found = cell(event); if (found) choose(found[0]); });
    place.replaceChildren(root);
    const shown = [..."KHrhf"].filter((letter) => "Kr".includes(letter) || sizes.some((z) => z.plan.includes(letter)));
    legend("map-legend", shown.map((letter) => [CHOICES[letter], TONES[letter], "box"]));
  }

  // One step: memory under three plans, and the block that runs at each time

  const PHASES = { g: "before", f: "forward of", h: "loss", r: "recompute of", b: "backward of", t: "embeddings" };
  const bound = (z) => z.at_most_as && `at most, measured at ${z.at_most_as}: too few sizes were observed to predict this one`;
  const pointsOf = (z, curve) => [[0, z.base_bytes], ...curve.ms.map((ms, i) => [ms, curve.bytes[i]])];

  function drawWithin() {
    const z = run.sizes[chosen], curves = z.curves;
    byId("size").value = chosen;
    byId("size-label").textContent = z.label;
    const again = recomputed(z.plan), verdict = z.plan_peak_bytes <= run.budget_bytes ? "fits" : z.at_most_as ? "may not fit" : "does not fit";
    byId("within-text").textContent = (z.at_most_as ? `Upper bounds: ${bound(z)}. ` : "") + `With all blocks kept the peak would be ${bytes(z.kept_peak_bytes)}, with all recomputed ${bytes(z.recomputed_peak_bytes)}. ` +
      `The plan recomputes ${again} of ${counted(z.plan.length, "block")} (${seconds(z.plan_seconds)} of ${seconds(z.whole_seconds)})${moved(z)} and peaks at ${bytes(z.plan_peak_bytes)}: ${verdict}.`;
    const longest = Math.max(...Object.values(curves).map((c) => c.ms[c.ms.length - 1]));
    const top = Math.max(z.kept_peak_bytes, Math.min(run.budget_bytes, 1.6 * z.kept_peak_bytes)) * 1.08;
    const plot = new Plot("within-chart", {
      x: [0, longest], y: [0, top], xLabel: "estimated ms", height: z.moved_bytes ? 366 : 350, bottom: z.moved_bytes ? 92 : 76,
      label: "Memory within one step under three plans",
    });
    plot.level(run.budget_bytes, "budget", "budget");
    plot.line(pointsOf(z, curves.kept), "keep", "opacity:.8;stroke-width:1.6");
    plot.line(pointsOf(z, curves.recomputed), "again", "opacity:.8;stroke-width:1.6");
    plot.area(pointsOf(z, curves.plan), "plan");
    plot.line(pointsOf(z, curves.plan), "plan", "stroke-width:2.4");
    drawWork(plot, z);
    plot.onHover((value, event) => {
      const c = curves.plan, i = nearest(c.ms, value), name = run.runs[c.run[i]];
      showTip(event, [`${PHASES[c.phase[i]]} ${name ?? ""}`, copyAt(z, value), `under the plan ${bytes(c.bytes[i])}`,
        ...[["kept", "all kept"], ["recomputed", "all recomputed"]].map(([key, text]) =>
          `${text} ${bytes(curves[key].bytes[nearest(curves[key].ms, value)])}`)]);
      return c.ms[i];
    });
    legend("within-legend", [["mimose's plan", "plan"], ["all kept", "keep"], ["all recomputed", "again"], ["budget", "budget", "dashed"]]);
    drawStripLegend(z);
  }
  const moved = (z) => (z.moved_bytes ? `, moves ${bytes(z.moved_bytes)} to the host and back (${seconds(z.stall_seconds)} of waiting for transfers)` : "");
  function copyAt(z, ms) {
    const i = z.copies.ms.findIndex(([begin, end]) => begin <= ms && ms <= end);
    return i >= 0 && `${z.copies.away[i] ? "copy to the host" : "copy back"}: ${bytes(z.copies.bytes[i])} of ${run.runs[z.copies.run[i]]}`;
  }

  function drawStripLegend(z) {
    const forwards = [["K", "kept"], ["H", "saved on the host"], ["r", "to be recomputed", " hollow"], ["h", "to be recomputed, input on the host"], ["f", "cannot be recomputed"]];
    legend("strip-legend", [
      ...forwards.filter(([letter]) => z.plan.includes(letter)).map(([letter, text, kind = ""]) => [`forward: ${text}`, TONES[letter], "box" + kind]),
      ...(recomputed(z.plan) ? [["recomputing", "again", "box"]] : []), ["backward", "grey", "box faint"], ["loss, embeddings", "grey", "box fainter"],
      ...(z.moved_bytes ? [["link: copy to the host", "ink", "box"], ["link: copy back", "grey", "box"]] : []),
    ]);
  }
  function drawWork(plot, z) {
    const c = z.curves.plan, y = plot.box.bottom + 25, high = 13;
    let begin = 0;
    for (let i = 0; i < c.ms.length; i += 1) {
      if (i + 1 < c.ms.length && c.phase[i + 1] === c.phase[i] && c.run[i + 1] === c.run[i]) continue;
      const phase = c.phase[i], letter = z.plan[c.run[i]];
      if (phase === "g") continue;
      const tone = phase === "r" ? "again" : phase === "f" ? TONES[letter] : "grey";
      const x = plot.x(begin), width = Math.max(0.5, plot.x(c.ms[i]) - x - 1);
      if (phase === "f" && letter === "r") plot.frame(x, y, width, high, "again");
      else plot.add("rect", { x, y, width, height: high, rx: 2, class: "work",
        style: `fill:${colour(tone)};opacity:${phase === "b" ? 0.45 : phase === "h" || phase === "t" ? 0.2 : 1}` });
      begin = c.ms[i];
    }
    const turn = c.ms[c.phase.lastIndexOf("h")], below = drawCopies(plot, z, y + high + 4) + 16;
    plot.add("text", { x: plot.x(0), y: below }, "forward →");
    if (turn !== undefined) plot.add("text", { x: plot.x(turn), y: below }, "backward →");
  }

  // The link to the host: when it copies, and which way. Returns where it ends on the page
  function drawCopies(plot, z, y) {
    if (!z.moved_bytes) return y - 4;
    const high = 8, end = plot.xRange[1];
    plot.add("text", { x: plot.box.left - 8, y: y + high, "text-anchor": "end" }, "link");
    plot.add("line", { class: "grid", x1: plot.box.left, x2: plot.box.right, y1: y + high, y2: y + high });
    z.copies.ms.forEach(([begin, until], i) => {
      const from = plot.x(Math.min(begin, end)), width = Math.max(0.5, plot.x(Math.min(until, end)) - from);
      plot.add("rect", { x: from, y, width, height: high, rx: 1.5, class: "copy", style: `fill:${colour(z.copies.away[i] ? "ink" : "grey")}` });
    });
    return y + high;
  }

  function drawTime() {
    const time = run.time;
    if (!time) { byId("time-card").hidden = true; return; }
    byId("time-text").textContent = `Over ${counted(time.steps, "planned step")}, which took ${seconds(time.seconds)} without pauses. By the final estimates, recomputing was about ${percent(Math.min(1, time.chosen_seconds / (time.seconds || 1)), 1)} of that. The static plan is that of the largest batch, used for all batches.`;
    const rows = [["mimose", time.chosen_seconds, "plan"], ["static plan", time.static_seconds, "grey"], ["everything", time.everything_seconds, "again"]];
    const place = byId("time-chart"), width = Math.max(320, place.clientWidth), left = 100;
    const most = Math.max(...rows.map((row) => row[1]), 1e-9);
    const root = svg("svg", { viewBox: `0 0 ${width} 104`, height: 104, role: "img", "aria-label": "Time spent recomputing, three ways" });
    rows.forEach(([name, value, tone], i) => {
      const y = 6 + 33 * i, long = ((width - left - 90) * value) / most;
      root.append(svg("text", { x: left - 10, y: y + 16, "text-anchor": "end", class: "name" }, name),
        svg("rect", { x: left, y, width: Math.max(2, long), height: 23, rx: 4, style: `fill:${colour(tone)}` }),
        svg("text", { x: left + Math.max(2, long) + 8, y: y + 16 }, seconds(value)));
    });
    place.replaceChildren(root);
  }

  function drawTables() {
    byId("events").tBodies[0].replaceChildren(...run.events.map((e) => make("tr", {},
      make("td", {}, String(e.step)), make("td", {}, seconds(e.at)), make("td", {}, e.kind), make("td", {}, e.text))));
    byId("no-events").hidden = run.events.length > 0;
    byId("events").hidden = run.events.length === 0;
    const z = run.sizes[chosen];
    byId("blocks-card").hidden = !z;
    if (!z) return;
    byId("blocks").tHead.rows[0].cells[1].textContent = `memory if kept, ${z.at_most_as ? "at most, measured at " + z.at_most_as : "at " + z.label}`;
    byId("blocks").tHead.rows[0].cells[3].textContent = `kept at (of ${counted(run.sizes.length, "size")})`;
    byId("blocks").tBodies[0].replaceChildren(...run.runs.map((name, k) => make("tr", {}, make("td", {}, name),
      make("td", { class: "number" }, bytes(z.saved_bytes[k])), make("td", { class: "number" }, seconds(z.run_seconds[k])),
      make("td", { class: "number" }, String(run.sizes.filter((size) => size.plan[k] === "K").length)))));
  }

  function choose(index) {
    if (index < 0 || index >= run.sizes.length) return;
    chosen = index;
    drawWithin();
    drawSizes();
    drawMap();
    drawTables();
  }
  function drawAll() {
    drawAbout();
    drawSummary();
    drawSteps();
    byId("known").hidden = run.sizes.length === 0;
    byId("unknown").hidden = run.sizes.length > 0;
    if (run.sizes.length) {
      byId("size").max = run.sizes.length - 1;
      choose(chosen);
      drawTime();
    } else drawTables();
  }

  byId("size").addEventListener("input", (event) => choose(Number(event.target.value)));
  byId("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  let waiting = 0;
  window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(drawAll, 120); });
  drawAll();
})();
