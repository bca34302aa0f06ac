// Asks the gateway over gRPC from Node: no generated code, only the files in proto/.
//
//     cd examples/node && npm ci
//     ../../.venv/bin/pdserve up &            # wait for "ready:"
//     node generate.mjs "What is the capital of France?" [HOST:PORT]

import { fileURLToPath } from "node:url";
import { credentials, loadPackageDefinition } from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const [question, gateway = "127.0.0.1:8470"] = process.argv.slice(2);
if (!question) {
  console.error('usage: node generate.mjs "QUESTION" [HOST:PORT]');
  process.exit(2);
}

const proto = process.env.PDSERVE_PROTO ?? fileURLToPath(new URL("../../proto", import.meta.url));
const definition = loadSync("pdserve/v1/gateway.proto", { includeDirs: [proto], keepCase: true, longs: Number });
const { Gateway } = loadPackageDefinition(definition).pdserve.v1;
const client = new Gateway(gateway, credentials.createInsecure());

const call = client.Generate(
  {
    chat: { messages: [{ role: "user", content: question }] },
    sampling: { temperature: 0, max_tokens: 60 },
  },
  { deadline: Date.now() + 60_000 },
);

// Text comes as bytes: a token may end inside a character.
const decoder = new TextDecoder();
try {
  for await (const event of call) {
    if (event.tokens) {
      process.stdout.write(decoder.decode(event.tokens.text, { stream: true }));
    } else if (event.finish) {
      const { prompt_tokens, output_tokens } = event.finish.usage;
      console.log(`${decoder.decode()}\n[${prompt_tokens} prompt tokens, ${output_tokens} output tokens]`);
    } else if (event.error) {
      throw new Error(event.error.message);
    }
  }
} catch (error) {
  console.error(`error: ${error.details ?? error.message}`);
  process.exitCode = 1;
} finally {
  client.close();
}
