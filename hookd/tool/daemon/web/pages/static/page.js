// Refreshes the sections of a live page while it is visible, with HTML from the same server, and lets commands be copied.
// Without this script the browser reloads the page.
"use strict";

const EVERY_MS = 3000;
const said = document.getElementById("live");
const button = document.createElement("button");
let isPaused = false;
let isAsking = false;

function say(text, isBad) {
  said.firstChild.data = text;
  said.classList.toggle("bad", isBad);
}

// Preserves what the reader has opened or closed, scrolled and focused.
function renew(old, fresh) {
  for (const one of fresh.querySelectorAll("details[id]")) {
    const known = document.getElementById(one.id);
    if (known && old.contains(known)) one.open = known.open;
  }
  if (fresh.outerHTML === old.outerHTML) return;
  const at = document.activeElement;
  const focused = old.contains(at) ? [...old.querySelectorAll("a, summary, [tabindex]")].indexOf(at) : -1;
  const scrolled = [...old.querySelectorAll(".wide")].map((one) => one.scrollLeft);
  old.replaceWith(fresh);
  [...fresh.querySelectorAll(".wide")].forEach((one, n) => { one.scrollLeft = scrolled[n] || 0; });
  const again = [...fresh.querySelectorAll("a, summary, [tabindex]")][focused];
  if (again) again.focus({ preventScroll: true });
}

function parts(page) {
  return [...page.querySelectorAll("section[id]")].map((one) => one.id).join();
}

function isSelecting() {
  const selection = document.getSelection();
  return selection !== null && !selection.isCollapsed;
}

async function look() {
  if (isPaused || isAsking || document.hidden || isSelecting()) return;
  isAsking = true;
  try {
    const where = new URL(location.href);
    where.searchParams.set("fragment", "1");
    const answer = await fetch(where, { cache: "no-store" });
    if (answer.status === 404) return location.reload();
    if (!answer.ok) throw new Error(answer.status);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (!isPaused) {
      if (parts(page) !== parts(document)) return location.reload();
      for (const fresh of page.querySelectorAll("section[id]")) {
        renew(document.getElementById(fresh.id), document.adoptNode(fresh));
      }
    }
    say(`live, ${new Date().toLocaleTimeString()}`, false);
  } catch (error) {
    say(`no answer (${error.message}), this page is out of date`, true);
  } finally {
    isAsking = false;
  }
}

function pause() {
  isPaused = !isPaused;
  button.textContent = isPaused ? "Resume" : "Pause";
  if (isPaused) say("paused", false); else look();
}

if ("live" in said.dataset) {
  said.append("live", button);
  button.type = "button";
  button.textContent = "Pause";
  button.addEventListener("click", pause);
  document.addEventListener("visibilitychange", look);
  setInterval(look, EVERY_MS);
}

// Commands to copy; the browser has a clipboard only on this machine and with TLS.
if (navigator.clipboard) {
  for (const command of document.querySelectorAll("code.copy")) {
    const copy = document.createElement("button");
    copy.type = "button";
    copy.textContent = "Copy";
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(command.textContent);
      copy.textContent = "Copied";
    });
    command.after(copy);
  }
}
