"use strict";
// Lists that are on a page whole can be sorted by any column; nothing else runs here.

const number = (text) => (/^\s*[-+]?[\d,.]+/.test(text) ? Number.parseFloat(text.replaceAll(",", "")) : Number.NaN);

function sort(table, column, descending) {
  const rows = [...table.tBodies[0].rows];
  const value = (row) => row.cells[column]?.dataset.value ?? row.cells[column]?.textContent.trim() ?? "";
  const known = (row) => !["", "–"].includes(value(row));
  const compare = (first, second) => {
    const [one, other] = [value(first), value(second)];
    const [a, b] = [number(one), number(other)];
    const order = Number.isNaN(a) || Number.isNaN(b) ? one.localeCompare(other) : a - b;
    return descending ? -order : order;
  };
  rows.sort((a, b) => known(b) - known(a) || compare(a, b)); // what is not known comes last, either way
  table.tBodies[0].append(...rows);
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    if (!cell.textContent.trim()) return;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...cell.childNodes);
    cell.append(button);
    cell.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const descending = cell.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
      cell.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sort(table, column, descending);
    });
  });
}
