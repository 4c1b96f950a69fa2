//! RocketMQ's official Rust client behind lines of JSON: the protocol is in README.md of the directory above.
//! It has producers and simple consumers.

use std::collections::HashMap;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rocketmq::conf::{ClientOption, ProducerOption, SimpleConsumerOption};
use rocketmq::model::common::{FilterExpression, FilterType};
use rocketmq::model::message::{Message, MessageBuilder, MessageView};
use rocketmq::model::transaction::{Transaction, TransactionResolution};
use rocketmq::{Producer, SimpleConsumer};
use serde_json::{json, Map, Value};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::task::JoinHandle;

type Failure = Box<dyn std::error::Error + Send + Sync>;
type Done = Result<Value, Failure>;

/// A simple consumer, and what each call of `receive` names anew.
struct Simple {
    consumer: SimpleConsumer,
    topic: String,
    filter: FilterType,
    expression: String,
}

struct Load {
    ended: Arc<AtomicBool>,
    running: Vec<JoinHandle<(Vec<Value>, Vec<String>)>>,
}

#[derive(Default)]
struct Driver {
    producers: RwLock<HashMap<String, Arc<Producer>>>,
    consumers: RwLock<HashMap<String, Arc<Simple>>>,
    messages: RwLock<Vec<Arc<MessageView>>>,
    loads: Mutex<HashMap<String, Load>>,
}

fn say(line: &Value) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).expect("the test reads what is said");
}

#[tokio::main]
async fn main() {
    let driver = Arc::new(Driver::default());
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let request: Value = serde_json::from_str(&line).expect("a line of JSON");
        let driver = driver.clone();
        tokio::spawn(async move {
            match driver.done(&request).await {
                Ok(done) => say(&json!({"id": request["id"], "ok": done})),
                Err(error) => say(&json!({"id": request["id"], "error": error.to_string()})),
            }
        });
    }
    std::process::exit(0);
}

impl Driver {
    async fn done(&self, request: &Value) -> Done {
        match text(request, "op").as_str() {
            "producer" => self.producer(request).await,
            "send" => self.send(request).await,
            "load" => self.load(request),
            "loaded" => self.loaded(request).await,
            "simple" => self.simple(request).await,
            "receive" => self.receive(request).await,
            "ack" => self.ack(request).await,
            "close" => self.close(request).await,
            other => Err(format!("this client has no {other}").into()),
        }
    }

    async fn producer(&self, request: &Value) -> Done {
        let mut option = ProducerOption::default();
        option.set_topics(texts(&request["topics"]));
        let name = text(request, "name");
        let mut made = match request["check"].as_str() {
            None => Producer::new(option, client_option(request))?,
            Some(says) => {
                let (says, name) = (says.to_string(), name.clone());
                let check = move |_: String, view: MessageView| {
                    say(&json!({"event": "check", "from": name, "message": told(&view)}));
                    match says.as_str() {
                        "commit" => TransactionResolution::COMMIT,
                        "rollback" => TransactionResolution::ROLLBACK,
                        _ => TransactionResolution::UNKNOWN,
                    }
                };
                Producer::new_transaction_producer(option, client_option(request), Box::new(check))?
            }
        };
        made.start().await?;
        self.producers.write().unwrap().insert(name, Arc::new(made));
        Ok(json!({}))
    }

    fn its_producer(&self, request: &Value) -> Arc<Producer> {
        self.producers.read().unwrap()[&text(request, "client")].clone()
    }

    async fn send(&self, request: &Value) -> Done {
        let producer = self.its_producer(request);
        let body = text(request, "body");
        let Some(how) = request["transaction"].as_str() else {
            let made = producer.send(message(request, &body)?).await?;
            return Ok(json!({"message_id": made.message_id()}));
        };
        let transaction = producer.send_transaction_message(message(request, &body)?).await?;
        let id = transaction.message_id().to_string();
        match how {
            "commit" => transaction.commit().await?,
            "rollback" => transaction.rollback().await?,
            _ => (),
        }
        Ok(json!({"message_id": id}))
    }

    fn load(&self, request: &Value) -> Done {
        let producer = self.its_producer(request);
        let ended = Arc::new(AtomicBool::new(false));
        let running = (0..number(request, "threads", 1))
            .map(|thread| tokio::spawn(run(producer.clone(), request.clone(), thread, ended.clone())))
            .collect();
        self.loads.lock().unwrap().insert(text(request, "name"), Load { ended, running });
        Ok(json!({}))
    }

    async fn loaded(&self, request: &Value) -> Done {
        let load = self.loads.lock().unwrap().remove(&text(request, "name")).ok_or("no such load")?;
        load.ended.store(true, Ordering::SeqCst);
        let (mut sent, mut errors) = (vec![], vec![]);
        for one in load.running {
            let (its_sent, its_errors) = one.await?;
            sent.extend(its_sent);
            errors.extend(its_errors);
        }
        Ok(json!({"sent": sent, "errors": errors}))
    }

    async fn simple(&self, request: &Value) -> Done {
        let subscriptions = request["subscriptions"].as_object().ok_or("no subscriptions")?;
        let (topic, expression) = subscriptions.iter().next().ok_or("no subscription")?;
        let mut option = SimpleConsumerOption::default();
        option.set_topics(vec![topic.clone()]);
        option.set_consumer_group(text(request, "group"));
        let mut client_option = client_option(request);
        client_option.set_long_polling_timeout(Duration::from_secs(number(request, "await_s", 5)));
        let mut consumer = SimpleConsumer::new(option, client_option)?;
        consumer.start().await?;
        let made = Simple {
            consumer,
            topic: topic.clone(),
            filter: if request["sql"] == true { FilterType::Sql } else { FilterType::Tag },
            expression: expression.as_str().unwrap_or("*").to_string(),
        };
        self.consumers.write().unwrap().insert(text(request, "name"), Arc::new(made));
        Ok(json!({}))
    }

    fn its_consumer(&self, request: &Value) -> Arc<Simple> {
        self.consumers.read().unwrap()[&text(request, "client")].clone()
    }

    async fn receive(&self, request: &Value) -> Done {
        let simple = self.its_consumer(request);
        let expression = FilterExpression::new(simple.filter, simple.expression.as_str());
        let period = Duration::from_millis(number(request, "invisible_ms", 30_000));
        let max = number(request, "max", 32) as i32;
        let found = simple.consumer.receive_with(&simple.topic, &expression, max, period).await?;
        let mut messages = self.messages.write().unwrap();
        let all: Vec<Value> = found
            .into_iter()
            .map(|view| {
                let mut one = told(&view);
                one["n"] = json!(messages.len());
                messages.push(Arc::new(view));
                one
            })
            .collect();
        Ok(json!({"messages": all}))
    }

    async fn ack(&self, request: &Value) -> Done {
        let message = self.messages.read().unwrap()[number(request, "message", 0) as usize].clone();
        self.its_consumer(request).consumer.ack(&*message).await?;
        Ok(json!({}))
    }

    async fn close(&self, request: &Value) -> Done {
        let name = text(request, "name");
        let producer = self.producers.write().unwrap().remove(&name);
        if let Some(one) = producer.and_then(Arc::into_inner) {
            one.shutdown().await?;
        }
        let consumer = self.consumers.write().unwrap().remove(&name);
        if let Some(one) = consumer.and_then(Arc::into_inner) {
            one.consumer.shutdown().await?;
        }
        Ok(json!({}))
    }
}

/// Send one message after the other until it is ended.
async fn run(
    producer: Arc<Producer>, request: Value, thread: u64, ended: Arc<AtomicBool>,
) -> (Vec<Value>, Vec<String>) {
    let (mut sent, mut errors, mut count) = (vec![], vec![], 0);
    while !ended.load(Ordering::SeqCst) {
        let body = format!("{}-{thread}-{count}", text(&request, "name"));
        let began = now_ms();
        match message(&request, &body) {
            Err(error) => errors.push(error.to_string()),
            Ok(message) => match producer.send(message).await {
                Ok(made) => sent.push(json!([body, made.message_id(), began, now_ms()])),
                Err(error) => errors.push(format!("{body}: {error}")),
            },
        }
        count += 1;
        tokio::time::sleep(Duration::from_millis(number(&request, "pause_ms", 0))).await;
    }
    (sent, errors)
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock past 1970").as_millis() as u64
}

fn client_option(request: &Value) -> ClientOption {
    let mut made = ClientOption::default();
    made.set_access_url(text(request, "endpoints"));
    made.set_enable_tls(request["tls"] == true);
    if let [access, secret] = &texts(&request["key"])[..] {
        made.set_access_key(access.clone());
        made.set_secret_key(secret.clone());
    }
    made
}

fn message(request: &Value, body: &str) -> Result<impl Message, Failure> {
    let body = body.to_string() + &"x".repeat(number(request, "pad", 0) as usize);
    let mut made = MessageBuilder::builder()
        .set_topic(text(request, "topic"))
        .set_body(body.into_bytes())
        .set_keys(texts(&request["keys"]));
    if let Some(tag) = request["tag"].as_str() {
        made = made.set_tag(tag);
    }
    if let Some(group) = request["group"].as_str() {
        made = made.set_message_group(group);
    }
    if request["delay_ms"].is_u64() {
        let due = SystemTime::now() + Duration::from_millis(number(request, "delay_ms", 0));
        made = made.set_delivery_timestamp(due.duration_since(UNIX_EPOCH)?.as_secs() as i64);
    }
    if request["transaction"].is_string() {
        made = made.enable_transaction();
    }
    let properties = request["properties"].as_object().cloned().unwrap_or_default();
    let properties = properties.iter().map(|(key, value)| (key.clone(), value.as_str().unwrap_or("").to_string()));
    Ok(made.set_properties(properties.collect::<HashMap<_, _>>()).build()?)
}

fn told(view: &MessageView) -> Value {
    let body = String::from_utf8_lossy(view.body());
    let mut keys = view.keys().to_vec();
    keys.sort();
    let properties: Map<String, Value> =
        view.properties().iter().map(|(key, value)| (key.clone(), json!(value))).collect();
    json!({
        "id": view.message_id(), "topic": view.topic(), "body": body.chars().take(200).collect::<String>(),
        "size": view.body().len(), "tag": view.tag(), "keys": keys, "group": view.message_group(), "priority": null,
        "properties": properties, "attempt": view.delivery_attempt(), "corrupted": false,
    })
}

fn text(request: &Value, name: &str) -> String {
    request[name].as_str().unwrap_or_default().to_string()
}

fn texts(values: &Value) -> Vec<String> {
    values.as_array().into_iter().flatten().filter_map(|one| one.as_str().map(str::to_string)).collect()
}

fn number(request: &Value, name: &str, otherwise: u64) -> u64 {
    request[name].as_u64().unwrap_or(otherwise)
}
