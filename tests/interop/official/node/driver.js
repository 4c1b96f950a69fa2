// RocketMQ's official Node.js client behind lines of JSON: the protocol is in README.md beside it.

import { createInterface } from 'node:readline';
import rocketmq from 'rocketmq-client-nodejs';
import definition from 'rocketmq-client-nodejs/proto/apache/rocketmq/v2/definition_pb.js';

const { Producer, SimpleConsumer, PushConsumer, FilterExpression, ConsumeResult } = rocketmq;
const { FilterType, TransactionResolution } = definition;
const ALWAYS = -1;
const RESOLUTIONS = {
  commit: TransactionResolution.COMMIT,
  rollback: TransactionResolution.ROLLBACK,
  unknown: TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED,
};
const quiet = { info() {}, debug() {}, warn: console.error, error: console.error };

const clients = new Map();
const messages = new Map();
const loads = new Map();

function say(line) {
  process.stdout.write(JSON.stringify(line) + '\n');
}

function options(request) {
  const key = request.key;
  return {
    endpoints: request.endpoints,
    namespace: '',
    sslEnabled: Boolean(request.tls),
    logger: quiet,
    ...(key ? { sessionCredentials: { accessKey: key[0], accessSecret: key[1] } } : {}),
  };
}

function subscriptions(request) {
  const kind = request.sql ? FilterType.SQL : FilterType.TAG;
  return new Map(Object.entries(request.subscriptions).map(([topic, said]) => [topic, new FilterExpression(said, kind)]));
}

function message(request) {
  return {
    topic: request.topic,
    body: Buffer.from(request.body + 'x'.repeat(request.pad ?? 0)),
    ...(request.tag ? { tag: request.tag } : {}),
    ...(request.keys ? { keys: request.keys } : {}),
    ...(request.group ? { messageGroup: request.group } : {}),
    ...(request.delay_ms ? { deliveryTimestamp: new Date(Date.now() + request.delay_ms) } : {}),
    ...(request.priority === undefined ? {} : { priority: request.priority }),
    ...(request.properties ? { properties: new Map(Object.entries(request.properties)) } : {}),
  };
}

function receipt(made) {
  return { message_id: made.messageId, ...(made.recallHandle ? { recall_handle: made.recallHandle } : {}) };
}

function told(view) {
  return {
    id: view.messageId,
    topic: view.topic,
    body: view.body.toString().slice(0, 200),
    size: view.body.length,
    tag: view.tag ?? null,
    keys: [...view.keys].sort(),
    group: view.messageGroup || null,
    priority: view.priority ?? null,
    properties: Object.fromEntries(view.properties),
    attempt: view.deliveryAttempt,
    corrupted: Boolean(view.corrupted),
  };
}

const sleep = milliseconds => new Promise(done => setTimeout(done, milliseconds));

class Load {
  #producer; #request; #ended = false; #sent = []; #errors = []; #running;

  constructor(producer, request) {
    this.#producer = producer;
    this.#request = request;
    this.#running = [...Array(request.threads ?? 1).keys()].map(thread => this.#run(thread));
  }

  async #run(thread) {
    for (let number = 0; !this.#ended; number++) {
      const body = `${this.#request.name}-${thread}-${number}`;
      const began = Date.now();
      try {
        const made = await this.#producer.send(message({ ...this.#request, body }));
        this.#sent.push([body, made.messageId, began, Date.now()]);
      } catch (error) {
        this.#errors.push(`${body}: ${error}`);
      }
      await sleep(this.#request.pause_ms ?? 0);
    }
  }

  async end() {
    this.#ended = true;
    await Promise.all(this.#running);
    return { sent: this.#sent, errors: this.#errors };
  }
}

const requests = {
  async producer(request) {
    const says = request.check;
    const checker = {
      async check(view) {
        say({ event: 'check', from: request.name, message: told(view) });
        return RESOLUTIONS[says];
      },
    };
    const made = new Producer({
      ...options(request), topics: request.topics ?? [], ...(says ? { checker } : {}),
    });
    await made.startup();
    clients.set(request.name, made);
  },

  async send(request) {
    const producer = clients.get(request.client);
    const how = request.transaction;
    if (!how) return receipt(await producer.send(message(request)));
    const transaction = producer.beginTransaction();
    const made = await producer.send(message(request), transaction);
    if (how === 'commit') await transaction.commit();
    if (how === 'rollback') await transaction.rollback();
    return receipt(made);
  },

  async recall(request) {
    const made = await clients.get(request.client).recallMessage(request.topic, request.handle);
    return { message_id: made.messageId };
  },

  async load(request) {
    loads.set(request.name, new Load(clients.get(request.client), request));
  },

  async loaded(request) {
    const one = loads.get(request.name);
    loads.delete(request.name);
    return one.end();
  },

  async simple(request) {
    const made = new SimpleConsumer({
      ...options(request),
      consumerGroup: request.group,
      subscriptions: subscriptions(request),
      awaitDuration: 1000 * (request.await_s ?? 5),
    });
    await made.startup();
    clients.set(request.name, made);
  },

  async receive(request) {
    const found = await clients.get(request.client).receive(request.max ?? 32, request.invisible_ms ?? 30000);
    return {
      messages: found.map(view => {
        messages.set(messages.size, view);
        return { n: messages.size - 1, ...told(view) };
      }),
    };
  },

  async ack(request) {
    await clients.get(request.client).ack(messages.get(request.message));
  },

  async change(request) {
    await clients.get(request.client).changeInvisibleDuration(messages.get(request.message), request.ms);
  },

  async push(request) {
    const seen = new Map();
    const fails = request.fail ?? {};
    const made = new PushConsumer({
      ...options(request),
      consumerGroup: request.group,
      subscriptions: subscriptions(request),
      messageListener: {
        async consume(view) {
          const what = told(view);
          seen.set(what.body, (seen.get(what.body) ?? 0) + 1);
          const times = fails[what.body] ?? fails['*'] ?? 0;
          const failed = times === ALWAYS || seen.get(what.body) <= times;
          say({ event: 'message', from: request.name, message: what, failed, at_ms: Date.now() });
          await sleep(request.hold_ms ?? 0);
          return failed ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
        },
      },
    });
    await made.startup();
    clients.set(request.name, made);
  },

  async close(request) {
    const one = clients.get(request.name);
    clients.delete(request.name);
    await one.shutdown();
  },
};

async function answer(request) {
  try {
    say({ id: request.id, ok: (await requests[request.op](request)) ?? {} });
  } catch (error) {
    say({ id: request.id, error: String(error?.stack ?? error) });
  }
}

process.on('unhandledRejection', error => console.error('unhandled', error));
createInterface({ input: process.stdin })
  .on('line', line => answer(JSON.parse(line)))
  .on('close', () => process.exit());
