// A worker of benchmarks/serving.py: llama.cpp by node-llama-cpp on one GGUF file, one sequence.
// One JSON object a line on standard input {batch, prompt: [[ids]], output}; one a line back {ttft, seconds, tokens}.
import {createInterface} from "node:readline";
import {getLlama} from "node-llama-cpp";

const [modelPath, threads] = [process.argv[2], Number(process.argv[3])];
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: threads});
const model = await llama.loadModel({modelPath, gpuLayers: 0});
const context = await model.createContext({contextSize: 2048, threads, flashAttention: false});
const sequence = context.getSequence();
console.log(JSON.stringify({ready: true, name: "llama.cpp Q4_1"}));

for await (const line of createInterface({input: process.stdin})) {
    const job = JSON.parse(line);
    await sequence.clearHistory();
    const start = performance.now();
    let first = 0, tokens = 0;
    for await (const token of sequence.evaluate(job.prompt[0], {temperature: 0, yieldEogToken: true})) {
        tokens += 1;
        if (tokens === 1) first = performance.now();
        if (tokens === job.output) break;
    }
    const end = performance.now();
    console.log(JSON.stringify({ttft: (first - start) / 1000, seconds: (end - first) / 1000, tokens: tokens - 1}));
}
process.exit(0);
