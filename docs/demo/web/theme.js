/* Light, dark, or as the system has it: `data-theme` of the document is always "light" or "dark", and "themechange" tells of a change.
A classic script in the head: the choice is made before anything is painted. */
(() => {
  "use strict";
  const NAME = "octavo.theme";
  const CHOICES = ["system", "light", "dark"];
  const system = matchMedia("(prefers-color-scheme: dark)");
  let choice = "system";
  try {
    choice = localStorage.getItem(NAME) ?? choice;
  } catch {
    // a browser without storage: the choice lasts as long as the page
  }
  if (!CHOICES.includes(choice)) choice = "system";

  function apply() {
    document.documentElement.dataset.theme = choice === "system" ? (system.matches ? "dark" : "light") : choice;
    document.dispatchEvent(new Event("themechange")); // for what is drawn on a canvas
  }

  function mountSwitch() {
    const button = document.getElementById("theme");
    const label = () => { button.textContent = `Theme: ${choice}`; };
    label();
    button.addEventListener("click", () => {
      choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
      try {
        localStorage.setItem(NAME, choice);
      } catch {
        // as above
      }
      label();
      apply();
    });
  }

  apply();
  system.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", mountSwitch);
})();
