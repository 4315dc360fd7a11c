// The conversation: folding, exact text, the way from hit to hit, and further parts in their place.
import { fragment } from "./fragments.js";

const FOLDED_PX = 420;
let unfoldsAll = false;

export default function startRollout() {
  fold(document);
  document.getElementById("here")?.scrollIntoView({ block: "center" });
  watch();
  toggle("exact", (on) => {
    for (const block of document.querySelectorAll(".foldable")) {
      const [shown, asItIs] = block.children;
      if (!asItIs) continue; // with hits, it is always as it was recorded
      shown.hidden = on;
      asItIs.hidden = !on;
    }
  });
  toggle("fold", (on) => {
    unfoldsAll = on;
    document.querySelectorAll(".foldable").forEach((block) => block.classList.remove("folded", "unfolded"));
    document.querySelectorAll(".unfold").forEach((button) => button.remove());
    if (!on) fold(document);
  });
  const find = document.getElementById("find");
  find.addEventListener("keydown", (event) => {
    // Enter searches for what was written, and again goes on to the next hit.
    const link = document.querySelector(`[data-key=${event.shiftKey ? "N" : "n"}]`);
    if (event.key !== "Enter" || !link || !find.form || find.value !== find.defaultValue.replace(/[\r\n]/g, "")) return;
    event.preventDefault();
    link.click();
  });
}

function toggle(id, change) {
  const button = document.getElementById(id);
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    change(on);
  });
}

function mayBeTall(text) {
  return text.length > 600 || text.split("\n").length > 15;
}

// The parts of a page. `made` tells equal ones: as the server wrote them, but for their number.
export function partsOf(page) {
  const parts = [...page.querySelector("#blocks").children];
  for (const part of parts) part.made ??= part.outerHTML.replace(/ id="part-\d+"/, "");
  return parts;
}

export function fold(root) {
  if (unfoldsAll) return;
  // All are measured before any is changed, or each change would lay the page out anew.
  const tall = [...root.querySelectorAll(".foldable:not(.folded, .unfolded)")].filter((block) => mayBeTall(block.firstElementChild.textContent)
    && block.scrollHeight > FOLDED_PX && !block.querySelector("#here") && !block.nextElementSibling?.classList.contains("unfold"));
  for (const block of tall) {
    block.classList.add("folded");
    const button = document.createElement("button");
    button.className = "unfold";
    button.textContent = "Show all of it";
    button.addEventListener("click", () => { block.classList.replace("folded", "unfolded"); button.remove(); });
    block.after(button);
  }
}

// Further parts are loaded when their link comes into view, earlier ones when theirs is pressed.
export function watch() {
  const further = document.getElementById("further"), earlier = document.getElementById("earlier");
  const seen = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    seen.disconnect();
    load(further);
  }, { rootMargin: "600px" });
  if (further) seen.observe(further);
  for (const more of [earlier, further]) {
    if (!more) continue;
    more.onclick = (event) => {
      if (!event.target.closest("a") || event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      seen.disconnect();
      load(more);
    };
  }
}

async function load(more) {
  const blocks = document.getElementById("blocks"), below = blocks.getBoundingClientRect().bottom;
  try {
    const page = await fragment(more.querySelector("a").href);
    const got = partsOf(page).filter((part) => !document.getElementById(part.id));
    for (const part of got) part.querySelector("#here")?.removeAttribute("id");
    if (more.id === "further") blocks.append(...got);
    else blocks.prepend(...got);
    fold(blocks);
    const next = page.querySelector(`#${more.id}`);
    if (next) more.replaceWith(next);
    else more.remove();
    if (more.id === "earlier") scrollBy(0, blocks.getBoundingClientRect().bottom - below);
  } catch (error) {
    more.append(` ${error.message}`);
    return;
  }
  watch();
}
