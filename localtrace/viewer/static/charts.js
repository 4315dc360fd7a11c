// Charts: loaded when they come into view; a line below says what the pointer or the focus is at.
import { fragment } from "./fragments.js";

export function startCharts(root) {
  for (const figure of root.querySelectorAll(".chart-card, .card")) listen(figure);
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      seen.unobserve(entry.target);
      load(entry.target, entry.target.dataset.src);
    }
  }, { rootMargin: "200px" });
  root.querySelectorAll(".lazy[data-src]").forEach((chart) => seen.observe(chart));
  for (const button of root.querySelectorAll("[data-metric]")) {
    button.addEventListener("click", () => {
      const place = document.createElement("div");
      document.getElementById("metric-charts").prepend(place);
      button.disabled = true;
      load(place, button.dataset.metric);
    });
  }
}

export async function load(place, address) {
  place.setAttribute("aria-busy", "true");
  try {
    const card = (await fragment(address)).querySelector(".chart-card");
    place.replaceChildren(card);
    listen(card);
  } catch (error) {
    const why = place.querySelector(".why") ?? place.appendChild(document.createElement("p"));
    why.className = "why";
    why.textContent = error.message;
  }
  place.removeAttribute("aria-busy");
}

function listen(figure) {
  const readout = figure.querySelector(".readout");
  const tell = (event) => {
    const strip = event.target.closest?.(".strip");
    if (strip && readout) readout.textContent = strip.getAttribute("aria-label");
  };
  figure.addEventListener("pointerover", tell);
  figure.addEventListener("focusin", tell);
  figure.addEventListener("pointerleave", () => { if (readout) readout.textContent = readout.dataset.hint; });
  figure.addEventListener("keydown", (event) => {
    const strip = event.target.closest?.(".strip");
    if (!strip || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    const all = [...figure.querySelectorAll(".strip")];
    const next = all[all.indexOf(strip) + (event.key === "ArrowRight" ? 1 : -1)];
    if (!next) return;
    event.preventDefault();
    strip.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  });
}
