"use strict";
// A click on a head sorts its table; the filter leaves the rows that have all of its words, in themselves, in the
// name above their table or in the title of their page.
(() => {
  const filter = document.querySelector("#filter");
  const count = document.querySelector("#count");

  // Numbers come first, by their value, then words; what is empty comes last, whichever the direction.
  function key(cell) {
    const text = cell.textContent.trim();
    const number = text.replace(/,(?=\d{3})/g, "").match(/^[-+]?\d+(\.\d+)?(e[-+]?\d+)?/i);
    if (number) return [0, Number(number[0]), text];
    return [text === "" || text === "-" ? 2 : 1, 0, text];
  }

  function sort(table, column, direction) {
    const rows = [...table.tBodies[0].rows].map((row) => [key(row.cells[column]), row]);
    rows.sort(([a], [b]) => a[0] - b[0] || direction * (a[1] - b[1] || a[2].localeCompare(b[2])));
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }

  const sections = [...document.querySelectorAll("section")].map((section) => ({
    section,
    link: document.querySelector(`nav a[href="#${section.id}"]`).parentElement,
    tables: [...section.querySelectorAll("table")].map((table) => {
      const before = table.previousElementSibling;
      const name = before && before.tagName === "P" ? before : null;
      const title = section.querySelector("h1").textContent;
      const above = `${title} ${name ? name.textContent : ""}`.toLowerCase();
      const rows = [...table.tBodies[0].rows].map((row) => [row, `${above} ${row.textContent}`.toLowerCase()]);
      return { table, name, rows };
    }),
  }));

  for (const { tables } of sections) {
    for (const { table } of tables) {
      const heads = [...table.tHead.rows[0].cells];
      heads.forEach((head, column) => {
        const button = document.createElement("button");
        button.append(...head.childNodes);
        head.append(button);
        button.addEventListener("click", () => {
          const down = head.getAttribute("aria-sort") === "ascending";
          heads.forEach((other) => other.removeAttribute("aria-sort"));
          head.setAttribute("aria-sort", down ? "descending" : "ascending");
          sort(table, column, down ? -1 : 1);
        });
      });
    }
  }

  function show() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0, all = 0;
    for (const { section, link, tables } of sections) {
      let here = 0;
      for (const { table, name, rows } of tables) {
        let left = 0;
        for (const [row, text] of rows) {
          row.hidden = !words.every((word) => text.includes(word));
          left += row.hidden ? 0 : 1;
        }
        table.hidden = words.length > 0 && left === 0;
        if (name) name.hidden = table.hidden;
        here += left;
        all += rows.length;
      }
      section.hidden = link.hidden = words.length > 0 && here === 0;
      shown += here;
    }
    count.textContent = `${shown.toLocaleString("en")} of ${all.toLocaleString("en")} rows`;
  }

  filter.addEventListener("input", show);
  show();
})();
