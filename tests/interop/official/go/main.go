// RocketMQ's official Go client behind lines of JSON: the protocol is in README.md beside it.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sort"
	"strings"
	"sync"
	"time"

	rmq "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
)

const always = -1

var resolutions = map[string]rmq.TransactionResolution{
	"commit": rmq.COMMIT, "rollback": rmq.ROLLBACK, "unknown": rmq.UNKNOWN,
}

type request struct {
	Id            int               `json:"id"`
	Op            string            `json:"op"`
	Name          string            `json:"name"`
	Client        string            `json:"client"`
	Endpoints     string            `json:"endpoints"`
	Topics        []string          `json:"topics"`
	Tls           bool              `json:"tls"`
	Key           []string          `json:"key"`
	Check         string            `json:"check"`
	Topic         string            `json:"topic"`
	Body          string            `json:"body"`
	Pad           int               `json:"pad"`
	Tag           string            `json:"tag"`
	Keys          []string          `json:"keys"`
	Group         string            `json:"group"`
	DelayMs       int64             `json:"delay_ms"`
	Properties    map[string]string `json:"properties"`
	Transaction   string            `json:"transaction"`
	Subscriptions map[string]string `json:"subscriptions"`
	Sql           bool              `json:"sql"`
	AwaitS        int64             `json:"await_s"`
	Max           int32             `json:"max"`
	InvisibleMs   int64             `json:"invisible_ms"`
	Message       int               `json:"message"`
	Ms            int64             `json:"ms"`
	Fail          map[string]int    `json:"fail"`
	HoldMs        int64             `json:"hold_ms"`
	Threads       int               `json:"threads"`
	PauseMs       int64             `json:"pause_ms"`
}

type object map[string]any

var (
	lock     sync.Mutex
	clients  = map[string]any{}
	messages []*rmq.MessageView
	loads    = map[string]*load{}
	out      = json.NewEncoder(os.Stdout)
	writing  sync.Mutex
)

func say(line object) {
	writing.Lock()
	defer writing.Unlock()
	if err := out.Encode(line); err != nil {
		panic(err)
	}
}

func main() {
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 64<<20)
	for in.Scan() {
		var asked request
		if err := json.Unmarshal(in.Bytes(), &asked); err != nil {
			panic(err)
		}
		go answer(asked)
	}
}

func answer(asked request) {
	done, err := do(asked)
	if err != nil {
		say(object{"id": asked.Id, "error": err.Error()})
		return
	}
	if done == nil {
		done = object{}
	}
	say(object{"id": asked.Id, "ok": done})
}

func do(asked request) (object, error) {
	switch asked.Op {
	case "producer":
		return makeProducer(asked)
	case "send":
		return send(asked)
	case "load":
		made := startLoad(client(asked.Client).(rmq.Producer), asked)
		keep(func() { loads[asked.Name] = made })
		return nil, nil
	case "loaded":
		return loads[asked.Name].end(), nil
	case "simple":
		return makeSimple(asked)
	case "receive":
		return receive(asked)
	case "ack":
		return nil, client(asked.Client).(rmq.SimpleConsumer).Ack(context.Background(), messages[asked.Message])
	case "change":
		period := time.Duration(asked.Ms) * time.Millisecond
		return nil, client(asked.Client).(rmq.SimpleConsumer).ChangeInvisibleDuration(messages[asked.Message], period)
	case "push":
		return makePush(asked)
	case "close":
		return nil, client(asked.Name).(interface{ GracefulStop() error }).GracefulStop()
	}
	return nil, fmt.Errorf("unknown op: %s", asked.Op)
}

// keep changes the tables, which client reads.
func keep(change func()) {
	lock.Lock()
	defer lock.Unlock()
	change()
}

func client(name string) any {
	lock.Lock()
	defer lock.Unlock()
	return clients[name]
}

func config(asked request) *rmq.Config {
	rmq.EnableSsl = asked.Tls
	key := &credentials.SessionCredentials{}
	if len(asked.Key) == 2 {
		key.AccessKey, key.AccessSecret = asked.Key[0], asked.Key[1]
	}
	return &rmq.Config{Endpoint: asked.Endpoints, ConsumerGroup: asked.Group, Credentials: key}
}

func subscriptions(asked request) map[string]*rmq.FilterExpression {
	kind := rmq.TAG
	if asked.Sql {
		kind = rmq.SQL92
	}
	made := map[string]*rmq.FilterExpression{}
	for topic, expression := range asked.Subscriptions {
		made[topic] = rmq.NewFilterExpressionWithType(expression, kind)
	}
	return made
}

func makeProducer(asked request) (object, error) {
	options := []rmq.ProducerOption{rmq.WithTopics(asked.Topics...)}
	if asked.Check != "" {
		options = append(options, rmq.WithTransactionChecker(&rmq.TransactionChecker{
			Check: func(view *rmq.MessageView) rmq.TransactionResolution {
				say(object{"event": "check", "from": asked.Name, "message": told(view)})
				return resolutions[asked.Check]
			},
		}))
	}
	made, err := rmq.NewProducer(config(asked), options...)
	if err != nil {
		return nil, err
	}
	keep(func() { clients[asked.Name] = made })
	return nil, made.Start()
}

func send(asked request) (object, error) {
	producer := client(asked.Client).(rmq.Producer)
	if asked.Transaction == "" {
		return receipt(producer.Send(context.Background(), message(asked, asked.Body)))
	}
	transaction := producer.BeginTransaction()
	made, err := producer.SendWithTransaction(context.Background(), message(asked, asked.Body), transaction)
	if err == nil && asked.Transaction == "commit" {
		err = transaction.Commit()
	}
	if err == nil && asked.Transaction == "rollback" {
		err = transaction.RollBack()
	}
	return receipt(made, err)
}

func makeSimple(asked request) (object, error) {
	if asked.AwaitS == 0 {
		asked.AwaitS = 5
	}
	made, err := rmq.NewSimpleConsumer(config(asked),
		rmq.WithSimpleAwaitDuration(time.Duration(asked.AwaitS)*time.Second),
		rmq.WithSimpleSubscriptionExpressions(subscriptions(asked)))
	if err != nil {
		return nil, err
	}
	keep(func() { clients[asked.Name] = made })
	return nil, made.Start()
}

// receive gives no messages where the client says that there are none, which it takes for an error.
func receive(asked request) (object, error) {
	if asked.Max == 0 {
		asked.Max = 32
	}
	if asked.InvisibleMs == 0 {
		asked.InvisibleMs = 30_000
	}
	period := time.Duration(asked.InvisibleMs) * time.Millisecond
	found, err := client(asked.Client).(rmq.SimpleConsumer).Receive(context.Background(), asked.Max, period)
	if err != nil && !strings.Contains(err.Error(), "MESSAGE_NOT_FOUND") {
		return nil, err
	}
	all := []object{}
	keep(func() {
		for _, view := range found {
			one := told(view)
			one["n"] = len(messages)
			messages = append(messages, view)
			all = append(all, one)
		}
	})
	return object{"messages": all}, nil
}

func makePush(asked request) (object, error) {
	if asked.Threads == 0 {
		asked.Threads = 4
	}
	seen := map[string]int{}
	made, err := rmq.NewPushConsumer(config(asked),
		rmq.WithPushAwaitDuration(5*time.Second),
		rmq.WithPushSubscriptionExpressions(subscriptions(asked)),
		rmq.WithPushConsumptionThreadCount(int32(asked.Threads)),
		rmq.WithPushMaxCacheMessageCount(1024),
		rmq.WithPushMaxCacheMessageSizeInBytes(64<<20),
		rmq.WithPushMessageListener(&rmq.FuncMessageListener{
			Consume: func(view *rmq.MessageView) rmq.ConsumerResult {
				what := told(view)
				body := what["body"].(string)
				times, given := asked.Fail[body]
				if !given {
					times = asked.Fail["*"]
				}
				var failed bool
				keep(func() {
					seen[body]++
					failed = times == always || seen[body] <= times
				})
				say(object{
					"event": "message", "from": asked.Name, "message": what, "failed": failed, "at_ms": time.Now().UnixMilli(),
				})
				time.Sleep(time.Duration(asked.HoldMs) * time.Millisecond)
				if failed {
					return rmq.FAILURE
				}
				return rmq.SUCCESS
			},
		}))
	if err != nil {
		return nil, err
	}
	keep(func() { clients[asked.Name] = made })
	return nil, made.Start()
}

func message(asked request, body string) *rmq.Message {
	made := &rmq.Message{Topic: asked.Topic, Body: []byte(body + strings.Repeat("x", asked.Pad))}
	if asked.Tag != "" {
		made.SetTag(asked.Tag)
	}
	made.SetKeys(asked.Keys...)
	if asked.Group != "" {
		made.SetMessageGroup(asked.Group)
	}
	if asked.DelayMs != 0 {
		made.SetDelayTimestamp(time.Now().Add(time.Duration(asked.DelayMs) * time.Millisecond))
	}
	for key, value := range asked.Properties {
		made.AddProperty(key, value)
	}
	return made
}

func receipt(made []*rmq.SendReceipt, err error) (object, error) {
	if err != nil {
		return nil, err
	}
	return object{"message_id": made[0].MessageID}, nil
}

func told(view *rmq.MessageView) object {
	body := string(view.GetBody())
	keys := append([]string{}, view.GetKeys()...)
	sort.Strings(keys)
	properties := view.GetProperties()
	if properties == nil {
		properties = map[string]string{}
	}
	return object{
		"id": view.GetMessageId(), "topic": view.GetTopic(), "body": body[:min(200, len(body))], "size": len(body),
		"tag": view.GetTag(), "keys": keys, "group": view.GetMessageGroup(), "priority": nil,
		"properties": properties, "attempt": view.GetDeliveryAttempt(), "corrupted": false,
	}
}

// load sends one message after the other, in several goroutines, until it is ended.
type load struct {
	lock    sync.Mutex
	running sync.WaitGroup
	ended   chan struct{}
	sent    [][]any
	errors  []string
}

func startLoad(producer rmq.Producer, asked request) *load {
	made := &load{ended: make(chan struct{}), sent: [][]any{}, errors: []string{}}
	for thread := range max(1, asked.Threads) {
		made.running.Add(1)
		go made.run(producer, asked, thread)
	}
	return made
}

func (one *load) run(producer rmq.Producer, asked request, thread int) {
	defer one.running.Done()
	for number := 0; ; number++ {
		body, began := fmt.Sprintf("%s-%d-%d", asked.Name, thread, number), time.Now().UnixMilli()
		made, err := producer.Send(context.Background(), message(asked, body))
		one.lock.Lock()
		if err != nil {
			one.errors = append(one.errors, body+": "+err.Error())
		} else {
			one.sent = append(one.sent, []any{body, made[0].MessageID, began, time.Now().UnixMilli()})
		}
		one.lock.Unlock()
		select {
		case <-one.ended:
			return
		case <-time.After(time.Duration(asked.PauseMs) * time.Millisecond):
		}
	}
}

func (one *load) end() object {
	close(one.ended)
	one.running.Wait()
	return object{"sent": one.sent, "errors": one.errors}
}
