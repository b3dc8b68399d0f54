// The official Node client through the gateway. Usage: node openai_node.mjs BASE_URL MODEL FLAKY_MODEL
import assert from "node:assert/strict";
import OpenAI from "openai";

const [base, model, flaky, scripted] = process.argv.slice(2);
const api = new OpenAI({ baseURL: base + "/v1", apiKey: "sk-clients-test", maxRetries: 0 });
const ask = { model, messages: [{ role: "user", content: "Name three colours." }], max_tokens: 16, temperature: 0 };
const tool = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: { type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"] },
  },
};
const forced = { type: "function", function: { name: "get_weather" } };
const cases = {
  async models() {
    const ids = [];
    for await (const entry of api.models.list()) ids.push(entry.id);
    assert.ok(ids.includes(model));
  },
  async chat() {
    const whole = await api.chat.completions.create(ask);
    assert.ok(whole.choices[0].message.content.length > 0);
    assert.ok(whole._request_id);
    let text = "";
    let usage = null;
    for await (const chunk of await api.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } })) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  },
  async "stream without usage"() {
    for await (const chunk of await api.chat.completions.create({ ...ask, stream: true })) assert.equal(chunk.choices.length, 1);
  },
  async tools() {
    const request = { ...ask, max_tokens: 60, tools: [tool], tool_choice: forced };
    const whole = await api.chat.completions.create(request);
    assert.equal(typeof JSON.parse(whole.choices[0].message.tool_calls[0].function.arguments).city, "string");
    const final = await api.chat.completions.stream(request).finalChatCompletion();
    assert.equal(final.choices[0].message.tool_calls[0].function.name, "get_weather");
  },
  async completions() {
    const done = await api.completions.create({ model, prompt: "One, two,", max_tokens: 5, temperature: 0 });
    assert.equal(done.usage.completion_tokens, 5);
  },
  async embeddings() {
    const made = await api.embeddings.create({ model, input: ["a cat", "a dog"] });
    assert.equal(made.data.length, 2);
    assert.ok(made.data[0].embedding.length > 10);
  },
  async responses() {
    const made = await api.responses.create({ model: scripted, input: "hi" });
    assert.ok(made.output_text.length > 0);
  },
  async errors() {
    await assert.rejects(api.chat.completions.create({ ...ask, model: "none" }), OpenAI.NotFoundError);
    await assert.rejects(api.chat.completions.create({ ...ask, n: 99 }), OpenAI.BadRequestError);
  },
  async retries() {
    const patient = new OpenAI({ baseURL: base + "/v1", apiKey: "sk-clients-test", maxRetries: 3 });
    const done = await patient.chat.completions.create({ ...ask, model: flaky });
    assert.equal(done.choices[0].message.content, "abc");
  },
  async cancel() {
    const stream = await api.chat.completions.create({ ...ask, max_tokens: 200, stream: true });
    for await (const chunk of stream) if (chunk) break;
  },
};
for (const [name, run] of Object.entries(cases)) {
  await run();
  console.log(`ok ${name}`);
}
