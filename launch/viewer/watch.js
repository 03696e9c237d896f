"use strict";
// Fetches the page again and again, and puts what has changed in its place; what is open stays open. All of it was
// escaped by whoever sent it, and scripts in it do not run.

const opened = () => new Set([...document.querySelectorAll("details[data-key][open]")].map((one) => one.dataset.key));

async function look() {
  const now = document.getElementById("now");
  try {
    const response = await fetch(`${location.origin}/${location.search}`);
    if (response.ok) {
      const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
      const open = opened();
      document.title = fresh.title;
      now.replaceChildren(...fresh.getElementById("now").childNodes);
      for (const one of now.querySelectorAll("details[data-key]")) one.open = open.has(one.dataset.key);
    }
    document.body.classList.toggle("silent", !response.ok);
  } catch {
    document.body.classList.add("silent"); // nobody answers: what is shown is old
  }
  setTimeout(look, 1000 * Number(now.dataset.seconds));
}

setTimeout(look, 1000 * Number(document.getElementById("now").dataset.seconds));
