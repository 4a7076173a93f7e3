"use strict";
(() => {
  const all = (selector, root = document) => Array.from(root.querySelectorAll(selector));
  const root = document.documentElement;
  const calm = matchMedia("(prefers-reduced-motion: reduce)");

  // --- light and dark -----------------------------------------------------------------------

  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
  });

  // --- tables: sort and filter --------------------------------------------------------------

  const key = (row, column) => {
    const cell = row.cells[column];
    const number = cell.dataset.v;
    if (number !== undefined) return Number(number);
    return cell.classList.contains("n") ? null : cell.textContent.trim().toLowerCase();
  };
  const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));

  const sort = (table, column, descending) => {
    const body = table.tBodies[0];
    const rows = Array.from(body.rows).map((row) => ({ row, at: key(row, column) }));
    rows.sort((a, b) => {
      if (a.at === null || b.at === null) return (a.at === null) - (b.at === null); // nothing is last
      return descending ? compare(b.at, a.at) : compare(a.at, b.at);
    });
    body.append(...rows.map((one) => one.row));
  };

  for (const table of all("table.sortable")) {
    const heads = Array.from(table.tHead.rows[table.tHead.rows.length - 1].cells);
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const descending = head.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        sort(table, column, descending);
      });
    });
  }

  for (const input of all("input[data-filter]")) {
    const table = document.getElementById(input.dataset.filter);
    const count = document.querySelector(`output[data-count="${input.dataset.filter}"]`);
    const rows = Array.from(table.tBodies[0].rows);
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += !row.hidden;
      }
      count.textContent = words.length ? `${shown} of ${rows.length} rows` : `${rows.length} rows`;
    });
  }

  // --- charts: tooltips and the legend ------------------------------------------------------

  const tip = document.getElementById("tip");
  const hide = () => { tip.hidden = true; };
  const show = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + 14 + box.width > innerWidth ? x - box.width - 14 : x + 14;
    tip.style.left = `${Math.max(4, Math.min(left, innerWidth - box.width - 4))}px`;
    tip.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - box.height - 4))}px`;
  };

  const said = (target, event) => {
    if (target.dataset.tip) return target.dataset.tip;
    const rows = JSON.parse(target.dataset.grid);
    const box = target.getBoundingClientRect();
    const i = Math.min(rows.length - 1, Math.floor(((event.clientY - box.top) / box.height) * rows.length));
    const row = rows[Math.max(0, i)];
    const j = Math.min(row.length - 1, Math.floor(((event.clientX - box.left) / box.width) * row.length));
    return `row ${i + 1}, column ${j + 1}\nerror ${row[Math.max(0, j)]}`;
  };

  for (const target of all("[data-tip], [data-grid]")) {
    target.addEventListener("pointermove", (event) => show(said(target, event), event.clientX, event.clientY));
    target.addEventListener("pointerdown", (event) => show(said(target, event), event.clientX, event.clientY));
    target.addEventListener("pointerleave", hide);
  }

  for (const chart of all(".chart")) {
    const bands = all(".band", chart);
    let at = -1;
    const mark = () => bands.forEach((band, i) => band.classList.toggle("on", i === at));
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") { at = -1; mark(); hide(); return; }
      if (!step || !bands.length) return;
      event.preventDefault();
      at = at < 0 ? (step > 0 ? 0 : bands.length - 1) : Math.max(0, Math.min(bands.length - 1, at + step));
      mark();
      const box = bands[at].getBoundingClientRect();
      show(bands[at].dataset.tip, box.left + box.width / 2, box.top + box.height / 2);
    });
    chart.addEventListener("blur", () => { at = -1; mark(); hide(); });
  }

  for (const button of all(".legend button")) {
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      button.closest(".plots").classList.toggle(`hide-${button.dataset.who}`, !on);
    });
  }

  // --- code: a statement and its block ------------------------------------------------------

  const maps = JSON.parse(document.getElementById("maps").textContent);

  const into = (code, line) => {
    // Only the pane scrolls: a page that jumps under the pointer cannot be read.
    const top = line.offsetTop - code.clientHeight / 3;
    if (line.offsetTop < code.scrollTop || line.offsetTop + line.offsetHeight > code.scrollTop + code.clientHeight) {
      code.scrollTo({ top, behavior: calm.matches ? "auto" : "smooth" });
    }
  };

  for (const kernel of all(".kernel")) {
    const map = maps[Number(kernel.dataset.map)];
    const sides = Object.fromEntries(all(".code", kernel).map((code) => [code.dataset.side, code]));
    if (!sides.tl || !sides.cu) continue;
    const lines = { tl: all(".line", sides.tl), cu: all(".line", sides.cu) };

    const clear = () => { for (const line of all(".line.on", kernel)) line.classList.remove("on"); };
    const light = (side, number) => {
      clear();
      const from = side === "tl" ? 2 : 0;
      const found = map.filter((s) => s[from] <= number && number <= s[from + 1]);
      for (const [cu0, cu1, tl0, tl1] of found) {
        lines.cu.slice(cu0 - 1, cu1).forEach((line) => line.classList.add("on"));
        lines.tl.slice(tl0 - 1, tl1).forEach((line) => line.classList.add("on"));
      }
      if (!found.length) return;
      const other = side === "tl" ? "cu" : "tl";
      const first = lines[other][found[0][side === "tl" ? 0 : 2] - 1];
      if (first) into(sides[other], first);
    };

    for (const side of ["tl", "cu"]) {
      const code = sides[side];
      const numberOf = (event) => {
        const line = event.target.closest(".line.m");
        return line ? Number(line.dataset.n) : null;
      };
      let last = null;
      code.addEventListener("pointerover", (event) => {
        const number = numberOf(event);
        if (event.pointerType === "touch" || number === last) return;
        last = number;
        if (number) light(side, number); else clear();
      });
      code.addEventListener("pointerleave", () => {
        last = null;
        clear();
        const held = document.activeElement.closest(".line.m"); // what is focused stays marked
        if (held && kernel.contains(held)) light(held.parentElement.dataset.side, Number(held.dataset.n));
      });
      code.addEventListener("click", (event) => {
        const line = event.target.closest(".line.m");
        if (line && String(getSelection()) === "") line.focus({ preventScroll: true }); // a tap
      });
      code.addEventListener("focusin", (event) => {
        const number = numberOf(event);
        if (number) light(side, number);
      });
      code.addEventListener("focusout", clear);
      code.addEventListener("keydown", (event) => {
        const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
        const here = event.target.closest(".line.m");
        if (!step || !here) return;
        const stops = lines[side].filter((line) => line.classList.contains("m"));
        const next = stops[stops.indexOf(here) + step];
        if (!next) return;
        event.preventDefault();
        here.tabIndex = -1;
        next.tabIndex = 0;
        next.focus({ preventScroll: true });
        into(code, next);
      });
    }
  }

  // --- which kernel -------------------------------------------------------------------------

  const which = document.getElementById("which");
  const choose = (id) => {
    for (const kernel of all(".kernel")) kernel.hidden = kernel.id !== id;
    which.value = id;
  };
  const follow = () => {
    const id = decodeURIComponent(location.hash.slice(1));
    const target = document.getElementById(id);
    if (!target || !target.classList.contains("kernel")) return;
    choose(id);
    document.getElementById("kernels").scrollIntoView();
  };
  if (which) {
    choose(which.value);
    which.addEventListener("change", () => choose(which.value));
    addEventListener("hashchange", follow);
    for (const link of all('a[href^="#kernel-"]')) link.addEventListener("click", () => setTimeout(follow));
    follow();
  }

  // --- paper --------------------------------------------------------------------------------

  let closed = [];
  addEventListener("beforeprint", () => {
    hide();
    closed = all("details:not([open])");
    for (const one of closed) one.open = true;
  });
  addEventListener("afterprint", () => { for (const one of closed) one.open = false; });
})();
