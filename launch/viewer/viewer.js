"use strict";
// Sends a tool's form to the sandbox and shows the result under it. What comes back is text, never markup.

function line(parent, tag, kind, text) {
  const element = document.createElement(tag);
  element.className = kind;
  element.textContent = text;
  parent.append(element);
}

function milliseconds(seconds) {
  return `${(1000 * seconds).toFixed(1)} ms`;
}

function show(place, answer) {
  const time = `${milliseconds(answer.wall_seconds)}, CPU ${milliseconds(answer.cpu_seconds)}`;
  line(place, "p", `kind ${answer.kind === "ok" ? "good" : "bad"}`, `${answer.kind} in ${time}`);
  line(place, "pre", answer.kind === "ok" ? "value" : "error", answer.kind === "ok" ? answer.shown : answer.error);
  if (answer.stdout) {
    line(place, "p", "muted", "It printed:");
    line(place, "pre", "stdout", answer.stdout);
  }
  if (answer.infrastructure) {
    line(place, "p", "bad", "This says nothing about the tool, only about the machine: run it again.");
  } else if (answer.note) {
    line(place, "p", "bad", answer.note);
  } else if (answer.solves.length) {
    const solved = answer.solves.map((one) => `sub-question ${one.sub_question} (${one.rule})`);
    line(place, "p", "verdict good", `solves ${solved.join(", ")}`);
  } else {
    line(place, "p", "verdict muted", "solves no sub-question");
  }
  for (const one of answer.solves) {
    const question = document.querySelector(`.questions [data-sub-question="${one.sub_question}"]`);
    if (question) question.classList.add("solved");
  }
}

async function run(form) {
  const button = form.querySelector("button.run");
  const place = form.querySelector(".result");
  button.disabled = true;
  place.replaceChildren();
  line(place, "p", "muted", "running …");
  try {
    // Not "/call": fetch refuses relative addresses on a page that was opened with the token in its address.
    const response = await fetch(`${location.origin}/call`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        environment: form.dataset.environment,
        tool: form.dataset.tool,
        arguments: form.elements.arguments.value,
      }),
    });
    const answer = await response.json();
    place.replaceChildren();
    if (response.ok) show(place, answer);
    else line(place, "p", "refused bad", answer.error);
  } catch (error) {
    place.replaceChildren();
    line(place, "p", "refused bad", `no answer (${error.message}); is launch.inspect still running?`);
  } finally {
    button.disabled = false;
  }
}

for (const form of document.querySelectorAll("form.call")) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run(form);
  });
}
for (const button of document.querySelectorAll("button.fill")) {
  button.addEventListener("click", () => {
    button.closest(".card").querySelector("textarea").value = button.dataset.arguments;
  });
}
