// The SQL editor: Ctrl+Enter runs it, Tab leaves it.
export default function startEditor() {
  const form = document.getElementById("editor");
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
}
