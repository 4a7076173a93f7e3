// Starts `flashwright lsp` for TL files. The server does the rest: see docs/editors.md.
const vscode = require("vscode");
const { LanguageClient } = require("vscode-languageclient/node");

let client;

function start() {
  const settings = vscode.workspace.getConfiguration("flashwright");
  const command = settings.get("command") || "flashwright";
  const gpu = settings.get("gpu");
  client = new LanguageClient(
    "flashwright",
    "Flashwright",
    { command, args: ["lsp"] },
    {
      documentSelector: [{ language: "tl" }],
      initializationOptions: gpu ? { gpu } : {},
    },
  );
  return client.start().catch((error) => {
    vscode.window.showErrorMessage(
      `Flashwright: ${command} lsp does not start (${error.message}). ` +
        "Install it with pip install 'flashwright[lsp]', or set flashwright.command.",
    );
  });
}

async function stop() {
  const running = client;
  client = undefined;
  if (running && running.isRunning()) await running.stop();
}

async function restart() {
  await stop();
  await start();
}

function activate(context) {
  context.subscriptions.push(
    vscode.commands.registerCommand("flashwright.restart", restart),
    vscode.workspace.onDidChangeConfiguration((change) => {
      if (change.affectsConfiguration("flashwright")) return restart();
    }),
  );
  return start();
}

module.exports = { activate, deactivate: stop };
